"""Data connections, the store's end: pages in and out beside gRPC, over TCP and for processes of the same host."""
