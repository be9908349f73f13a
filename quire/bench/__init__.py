"""The load generator and the measurements of `quire bench`, with vLLM's names. It needs no library, and uses uvloop if
that is installed."""
