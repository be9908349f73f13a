"""How much a key may ask for: requests and tokens per minute, shared by the routers of a Redis where there is one."""
