"""Which sequences run, and how far: starts, growth, slots and the credit that a Grant gives."""
