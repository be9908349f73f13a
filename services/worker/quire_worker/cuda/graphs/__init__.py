"""Steps that are captured as CUDA graphs, and the choice of the steps that are captured."""
