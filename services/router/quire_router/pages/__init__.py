"""Who holds which KV pages: the router's index, built from the page event streams of schedulers and kvstores.

A hint and nothing more: what it does not know, or knows wrongly, costs time and never an answer.
"""
