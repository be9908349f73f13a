"""How a body becomes a checked request: in this process or, if it is long, in a child process."""
