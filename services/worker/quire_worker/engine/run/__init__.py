"""The model thread: Grants come in, steps run, Reports go out."""
