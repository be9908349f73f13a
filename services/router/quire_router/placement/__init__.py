"""Placement: chooses the replica that runs a request. A policy filters replicas, scores them and picks one. Each file
has one part of a policy, and a registry has the policies by name."""
