"""Loads the flags of rendered containers by the services' own code."""

from __future__ import annotations

import importlib
import re
import tempfile
from pathlib import Path
from typing import Any, cast

from quire_common.config import ServiceConfig, load_config, split_address
from quire_common.discovery import make_discovery
from quire_common.errors import QuireError
from quire_common.identity.exposure import require_private
from quire_router.config import refuse_plain_ports

SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
ENVIRONMENT = {"POD_IP": "10.244.1.7", "POD_NAME": "quire-pod-1"}
# Contents of the files of secrets that a service reads before it starts.
SECRETS = {
    "redis/url": "redis://user:word@redis:6379/0",
    "pages-redis/url": "redis://r:6379/1",
    "page-mac/key": "a" * 64,
}
# Variables of the kubelet, and of programs that the service starts.
FOREIGN = ("POD_IP", "POD_NAME", "HOME", "QUIRE_CACHE_DIR", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN")
_VARIABLE = re.compile(r"\$\((\w+)\)")


def config_class(service: str) -> type[ServiceConfig]:
    """Return the dataclass of the service's options."""
    return cast(
        "type[ServiceConfig]",
        getattr(importlib.import_module(f"quire_{service}.config"), service.capitalize() + "Config"),
    )


def load(container: dict[str, Any]) -> ServiceConfig:
    """Load the container's flags as its service does. Raises QuireError, also where the service would refuse to open a
    port."""
    service = container["name"]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SECRETS.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        arguments = [_expand(str(each)).replace("=/secrets/", f"={folder}/") for each in container.get("args", [])]
        variables = {
            each["name"]: each.get("value", "") for each in container.get("env", []) if each["name"] not in FOREIGN
        }
        config = load_config(config_class(service), service, arguments, variables)
    secured = bool(config.tls_cert)
    for option, address in (("listen", config.listen), ("metrics_listen", config.metrics_listen)):
        if address and not (service == "router" and option == "metrics_listen"):
            require_private(config, split_address(address, option)[0], option, secured=secured)
    static = {name: getattr(config, f"{name}s", ()) for name in ("scheduler", "tokenizer", "kvstore")}
    make_discovery(config.discovery, static)
    if service == "router":
        refuse_plain_ports(cast("Any", config))
    return config


def _expand(argument: str) -> str:
    return _VARIABLE.sub(lambda found: ENVIRONMENT.get(found[1], found[0]), argument)


def problems_of(container: dict[str, Any]) -> list[str]:
    """Return what the service says of its flags."""
    try:
        load(container)
    except QuireError as error:
        return [f"{container['name']}: {error.code}: {error.message}"]
    except SystemExit:
        return [f"{container['name']}: the flags are no flags"]
    return []
