"""OpenAI's HTTP interface: routes, parsing, formats, server-sent events. Knows nothing of schedulers."""
