"""What the prefix cache and the kvstore spare of conversations."""
