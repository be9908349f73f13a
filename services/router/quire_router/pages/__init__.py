"""The router's index of KV pages: which schedulers and kvstores hold which pages, built from their streams of page
events.

The index is only a hint. If it lacks a page or is wrong, a request takes longer, but its answer is the same.
"""
