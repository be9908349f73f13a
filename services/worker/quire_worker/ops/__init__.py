"""The operations that a decoder consists of: one interface, and its implementations."""
