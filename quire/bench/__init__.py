"""Load and its measurement, by vLLM's names: what `quire bench` runs. Needs no library; takes uvloop where it is."""
