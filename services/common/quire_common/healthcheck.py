"""`python -m quire_common.healthcheck HOST:PORT [liveness|readiness]`: exit 0 if the service there is ready, or with
`liveness` if its process answers. For containers and probes.

With mutual TLS, QUIRE_HEALTHCHECK_TLS_CA, _TLS_CERT and _TLS_KEY name the PEM files. QUIRE_HEALTHCHECK_SERVICE names
the service at the address; the certificate must contain this name. A public certificate contains another name, which
QUIRE_HEALTHCHECK_SERVER_NAME gives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire_common.config import ServiceConfig, load_config, option
from quire_common.serving.health import LIVENESS, READINESS
from quire_common.transport import channel_credentials, verified_name

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class HealthcheckConfig(ServiceConfig):
    """How a probe reaches the service."""

    service: str = option("", "the service that listens at the address; under TLS its name is verified")
    server_name: str = option("", "under TLS, another name to look for in the server's certificate")


def check(address: str, config: HealthcheckConfig, name: str = READINESS) -> bool:
    """Return whether grpc.health.v1 at `address` (host:port) reports SERVING for the name within two seconds, over TLS
    if the config names an authority. False if it cannot be reached or answers with an error. `config.server_name`, if
    given, is looked for in the server's certificate in place of the name of `config.service`; with neither, the host of
    the address is. Raises ConfigError for TLS files that cannot be used."""
    credentials = channel_credentials(config)
    named = [verified_name(config.service)] if config.service else []
    if config.server_name:
        named = [("grpc.ssl_target_name_override", config.server_name)]
    make = grpc.insecure_channel if credentials is None else lambda a: grpc.secure_channel(a, credentials, named)
    with make(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=name)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """Probe the address on the command line; the options come from the environment. Returns the exit code: 0 if it
    serves, 1 if not, 2 for wrong arguments, for which the usage is written to stderr. Raises ConfigError for options
    or TLS files that cannot be used."""
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], [LIVENESS], [READINESS]):
        sys.stderr.write(f"usage: python -m quire_common.healthcheck HOST:PORT [{LIVENESS}|{READINESS}]\n")
        return 2
    address, name = (*sys.argv[1:], READINESS)[:2]
    return 0 if check(address, load_config(HealthcheckConfig, "healthcheck", []), name) else 1


if __name__ == "__main__":
    sys.exit(main())
