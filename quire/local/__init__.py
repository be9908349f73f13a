"""The local supervisor: the five services as child processes of one process on this machine."""
