"""Transports of pages between the ring and a kvstore or a peer: one file for each transport, one interface, and the
choice between them."""
