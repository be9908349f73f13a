"""Schedulers as the router sees them: the fleet, one session for each, and migration between them."""
