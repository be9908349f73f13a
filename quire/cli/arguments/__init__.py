"""Flags that several commands share: the address of a running stack, and the description of a new stack."""
