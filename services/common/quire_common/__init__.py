"""The code that Quire's services share. It knows nothing of models, HTTP routes or schedules,
and imports no service."""

import os

# gRPC reads these as it is imported, which is after this. With its event engine, three threads hand a message on before
# a service sees it; without, the one that waits for it reads it: a third less time for each message between services.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# Then nobody reads a refused connection while no call waits, unless a timer does: it is due every 5 s by default.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "500")
