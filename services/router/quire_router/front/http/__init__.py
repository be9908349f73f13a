"""The HTTP interface: routes, parsing, answer formats, server-sent events. It knows nothing of schedulers."""
