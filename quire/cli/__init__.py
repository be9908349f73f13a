"""The command line `quire COMMAND`. Each command has a file, and `registry` lists them."""
