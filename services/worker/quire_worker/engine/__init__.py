"""The engine: slots, the batch rule and the step, driven by Grants and answering with Reports.

Usable without gRPC: `engine.apply(grant)`, then `engine.step()` until it returns None. Knows nothing of text, requests'
owners, queues or prefix caches: the scheduler has decided all of that.
"""
