"""The local supervisor: a stack's services as child processes of one process on this machine."""
