"""Discovery of peers: from flags, from DNS, or from Redis. A request never names a peer."""

from quire_common.discovery.endpoint import Discovery, Endpoint
from quire_common.discovery.factory import make_discovery

__all__ = ["Discovery", "Endpoint", "make_discovery"]
