"""Placement policies over simulated replicas, in virtual time."""
