"""Makes a checked request of a body: in this process or, if it is long, in a child process."""
