"""The limits of an API key: requests and tokens per minute, and sequences in progress. If there is a Redis, all routers
count together."""
