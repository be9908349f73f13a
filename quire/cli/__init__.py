"""The command line: `quire COMMAND`. One file per command; `registry` lists them."""
