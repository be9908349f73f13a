"""The tiers below RAM. Their backends may be slow, full, broken or away; only the metrics show it."""
