"""The tiers below RAM. Their backends may be slow, full, broken or away; only metrics show it, and lookups miss."""
