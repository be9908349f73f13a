"""The engine: slots, the batch rule and the step. The scheduler drives it by Grants, and it answers with Reports.

The engine works without gRPC: call `engine.apply(grant)`, then `engine.launch()` and `engine.collect()`. It knows
nothing of text, of the owners of requests, of queues or of prefix caches: the scheduler decides about these.
"""
