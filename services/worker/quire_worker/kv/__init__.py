"""The page pool and its geometry."""
