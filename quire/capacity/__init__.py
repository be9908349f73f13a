"""Estimates how many replicas a load needs. Sizes come from config.json, speeds from Quire's own benchmarks."""
