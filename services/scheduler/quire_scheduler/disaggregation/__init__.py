"""Prefill at one replica, decode at another: hand-overs, pulls, and pages that are kept for others."""
