"""Where peers are: from flags, from DNS, or from Redis. Peers never come from a request."""

from quire_common.discovery.endpoint import Discovery, Endpoint
from quire_common.discovery.factory import make_discovery

__all__ = ["Discovery", "Endpoint", "make_discovery"]
