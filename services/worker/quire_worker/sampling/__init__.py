"""From logits to tokens, by counter-based random numbers."""
