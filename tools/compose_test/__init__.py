"""Tests the compose stack of deploy/compose with real containers, under load, while containers are killed and
restarted."""
