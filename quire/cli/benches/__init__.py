"""The kinds of `quire bench`, one module each, with the names of `quire.cli.registry.Command`."""
