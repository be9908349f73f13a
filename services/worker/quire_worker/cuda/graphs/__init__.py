"""Steps that were captured as CUDA graphs, and which are made when."""
