"""Model families with layer norms."""
