"""The operations that a decoder is made of: one interface, a torch reference."""
