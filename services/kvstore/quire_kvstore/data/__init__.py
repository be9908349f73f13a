"""Data connections, at the store's end. They carry pages in and out beside gRPC: over TCP, and to processes of the same
host."""
