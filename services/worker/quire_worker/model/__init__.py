"""Models as data (specs, families) and the one decoder that runs them."""
