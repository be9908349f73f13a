"""How pages travel between the ring and a kvstore: a file for each transport, one interface, and the choice between."""
