"""What lies below the RAM tier: backends that may be slow, full, broken or away, and only the metrics notice."""
