"""Which certificate a service shows, under which name it is verified, and which callers each RPC has."""
