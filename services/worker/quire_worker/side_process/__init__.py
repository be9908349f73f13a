"""Processes beside the engine: they are started, watched and restarted alike, and talk in frames over a socket."""
