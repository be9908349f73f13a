"""Flags that several commands have: how to reach a running stack, and what a stack of their own is made of."""
