"""The compose stack of deploy/compose, really up, under load, with containers killed and restarted."""
