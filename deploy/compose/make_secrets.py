"""Makes the certificates, passwords and keys with which the services of the stack trust each other. Each service has
its own folder of files.

    make        certificates, the passwords of Redis, an API key and the key of pages' MACs. Certificates are made anew
                each time; all else stays as it is. Prints the API key.
    public-ca   prints the authority of the public certificate, for clients (`curl --cacert`)
    key         prints the API key

Runs in the image kvstore (compose.yaml), which has the package cryptography.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
# The keys that each user of Redis may touch. Services keep addresses there; routers also share limits and responses.
DISCOVERY_KEYS = "~quire:endpoint:* ~quire:instances:* ~quire:life"
REDIS_USERS = {
    "router": f"{DISCOVERY_KEYS} ~quire:limit:* ~quire:concurrent:* ~quire:response:* ~quire:responses:*",
    "tokenizer": DISCOVERY_KEYS,
    "scheduler": DISCOVERY_KEYS,
    "kvstore": DISCOVERY_KEYS,
}
REDIS_COMMANDS = "+@all -@admin -@dangerous"
REDIS = "redis://{user}:{password}@redis:6379/0"
# Names of API keys and what each may do.
API_KEYS = {"client": "inference", "prometheus": "metrics", "operator": "admin, metrics"}
PUBLIC_HOSTS = ("router", "router-2", "balancer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where a folder for each service is")
    parser.add_argument("what", choices=("make", "public-ca", "key"))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if arguments.what == "make":
        make(folder)
    elif arguments.what == "public-ca":
        print((folder / "authority" / "public-ca.pem").read_text(), end="")
    if arguments.what != "public-ca":
        print(kept(folder)["client"])
    return 0


def make(folder: Path) -> None:
    """Write all files. Raises CalledProcessError where no certificates can be made."""
    own = folder / "authority"
    hosts = [word for host in PUBLIC_HOSTS for word in ("--host", host)]
    subprocess.run([sys.executable, "-m", "quire", "certs", str(own), *hosts], check=True, stdout=subprocess.DEVNULL)
    passwords = kept(folder)
    for service in SERVICES:
        copy(own, folder / service, {f"{service}.pem": "tls.pem", f"{service}.key": "tls.key", "ca.pem": "ca.pem"})
    for service in ("worker", "kvstore"):
        copy(own, folder / service, {"page_mac.key": "page_mac.key"})
    for user in REDIS_USERS:
        write(folder / user / "discovery", REDIS.format(user=user, password=passwords[f"redis-{user}"]))
    write(folder / "router" / "redis", REDIS.format(user="router", password=passwords["redis-router"]))
    copy(own, folder / "router", {"public.pem": "public.pem", "public.key": "public.key"})
    copy(own, folder / "router", {"public-ca.pem": "public-ca.pem"})
    copy(own, folder / "balancer", {"public-ca.pem": "public-ca.pem"})
    write(folder / "router" / "keys.yaml", key_file(passwords))
    write(folder / "redis" / "users.acl", redis_users(passwords))
    write(folder / "redis" / "probe", passwords["redis-probe"])
    # Prometheus runs as another user, and this volume is mounted nowhere else.
    names = {"metrics.pem": "tls.pem", "metrics.key": "tls.key", "ca.pem": "ca.pem", "public-ca.pem": "public-ca.pem"}
    copy(own, folder / "metrics", names, mode=0o644)
    write(folder / "metrics" / "api-key", passwords["prometheus"], mode=0o644)
    (folder / "metrics").chmod(0o755)


def kept(folder: Path) -> dict[str, str]:
    """All passwords and API keys, by name; those that are missing are made."""
    path = folder / "authority" / "passwords.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    wanted = [*API_KEYS, "redis-probe", *(f"redis-{user}" for user in REDIS_USERS)]
    passwords = {name: found.get(name) or f"quire-{secrets.token_urlsafe(32)}" for name in wanted}
    if passwords != found:
        write(path, json.dumps(passwords))
    return passwords


def key_file(passwords: dict[str, str]) -> str:
    """The router's key file, which has digests of the keys."""
    entries = [
        f"  - name: {name}\n    sha256: {digest(passwords[name])}\n    scopes: [{scopes}]"
        for name, scopes in API_KEYS.items()
    ]
    return "\n".join(["keys:", *entries, ""])


def redis_users(passwords: dict[str, str]) -> str:
    """The ACL file of Redis, which has digests of the passwords."""
    lines = [
        f"user {user} on #{digest(passwords[f'redis-{user}'])} {keys} {REDIS_COMMANDS}"
        for user, keys in REDIS_USERS.items()
    ]
    probe = f"user probe on #{digest(passwords['redis-probe'])} -@all +ping"
    return "\n".join(["user default off", probe, *lines, ""])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def copy(source: Path, target: Path, names: dict[str, str], mode: int = 0o600) -> None:
    """Copy files, each under its new name."""
    for old, new in names.items():
        write(target / new, (source / old).read_text(), mode)


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Put a file in its place at once, since services read it again when it changes."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_EXCL, mode), "w") as file:
        file.write(text)
    new.chmod(mode)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
