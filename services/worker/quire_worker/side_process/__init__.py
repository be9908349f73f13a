"""Processes beside the engine. All are started, watched and restarted in the same way, and exchange frames with the
engine over a socket."""
