"""Disaggregated serving, where one replica prefills a request and another decodes it: handovers, pulls, and pages that
are kept for other engines."""
