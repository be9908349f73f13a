"""How much a key may ask for: requests and tokens per minute, and sequences in progress. Routers share the counts
through Redis where there is one."""
