"""The CPU worker: its step, its attention, its neighbours."""
