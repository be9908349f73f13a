"""Runs rendered pods by `podman kube play`, and does what a cluster does around them.

That is: names, addresses, volumes, probes, and the end of a pod. Podman knows no services, and none of `lifecycle`,
`fieldRef` and probes over HTTP."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.kube.chart import Pods
from tools.images.podman import environment

USER = 65532
LIMIT_S = 300.0
_VARIABLE = re.compile(r"\$\((POD_IP|POD_NAME)\)")
# Fields that podman does not know, or that only a cluster has.
_NOT_PODMANS = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "serviceAccountName",
    "topologySpreadConstraints",
)
# Fields of a container: podman opens `ports` on the host.
_NOT_OF_CONTAINERS = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports")


async def podman(*arguments: str, check: bool = True) -> str:
    """Run podman as `make images` does, and return what it printed. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        "podman", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    out, error = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert not check or process.returncode == 0, f"podman {' '.join(arguments)}: {error.decode()[-2000:]}"
    return out.decode()


@dataclass
class PodmanPod:
    """A pod of the chart, at an address of a podman network. `names` are the addresses of services, which a cluster's
    DNS would know."""

    name: str
    address: str
    pods: Pods
    network: str
    folder: Path
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        """Return what podman gets of the rendered pod."""
        spec = {key: value for key, value in copy.deepcopy(self.pods.spec).items() if key not in _NOT_PODMANS}
        spec["hostAliases"] = [{"ip": ip, "hostnames": [name]} for name, ips in self.names.items() for ip in ips]
        spec["restartPolicy"] = "Never"
        spec["volumes"] = [self._volume(each) for each in spec.get("volumes", [])]
        for container in spec["containers"]:
            container["args"] = [self._expand(str(each)) for each in container.get("args", [])]
            container["env"] = [each for each in container.get("env", []) if "value" in each]
            for name in _NOT_OF_CONTAINERS:
                container.pop(name, None)
            container["resources"] = {"limits": {"memory": container["resources"]["limits"]["memory"]}}
        labels = self.pods.labels
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name, "labels": labels}, "spec": spec}

    def _expand(self, argument: str) -> str:
        values = {"POD_IP": self.address, "POD_NAME": self.name}
        return _VARIABLE.sub(lambda found: values[found[1]], argument)

    def _volume(self, volume: dict[str, Any]) -> dict[str, Any]:
        """An emptyDir becomes a folder of the pod's user."""
        if "emptyDir" not in volume:
            return volume
        folder = self.folder / self.name / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, USER, USER)
        return {"name": volume["name"], "hostPath": {"path": str(folder), "type": "Directory"}}

    async def start(self) -> None:
        """Play the pod with empty volumes."""
        shutil.rmtree(self.folder / self.name, ignore_errors=True)
        file = self.folder / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(self.manifest()))
        place = ("--network", self.network, "--ip", self.address, "--mac-address", _hardware_address(self.address))
        await podman("kube", "play", *place, str(file))

    async def wait_ready(self) -> None:
        """Ask the readiness probes of all containers, as a kubelet does, until all answer 200."""
        deadline = time.monotonic() + LIMIT_S
        async with httpx.AsyncClient(trust_env=False, verify=ssl.create_default_context(), timeout=5.0) as client:
            for container in self.pods.containers:
                probe = container.get("readinessProbe", {}).get("httpGet")
                while probe and not await self._answers(client, probe):
                    assert time.monotonic() < deadline, await self.logs()
                    await asyncio.sleep(0.2)

    async def _answers(self, client: httpx.AsyncClient, probe: Mapping[str, Any]) -> bool:
        try:
            answer = await client.get(f"{probe['scheme'].lower()}://{self.address}:{probe['port']}{probe['path']}")
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    async def logs(self) -> str:
        """Return the ends of the containers' logs."""
        parts = [
            await podman("logs", "--tail", "5", f"{self.name}-{each['name']}", check=False)
            for each in self.pods.containers
        ]
        return f"{self.name} is not ready: {parts}"

    async def end(self) -> None:
        """End the pod as a kubelet does: each container gets SIGTERM after the sleep of its preStop, and all have to
        end within the grace. Raises AssertionError for a container that would be killed, or that ends with an error."""
        grace = self.pods.spec["terminationGracePeriodSeconds"]
        async with asyncio.timeout(grace):
            codes = await asyncio.gather(*(self._end(each) for each in self.pods.containers))
        assert set(codes) == {0}, (self.name, codes)
        await self.remove()

    async def _end(self, container: Mapping[str, Any]) -> int:
        await asyncio.sleep(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        name = f"{self.name}-{container['name']}"
        await podman("kill", "--signal", "TERM", name)
        return int(await podman("wait", name))

    async def remove(self) -> None:
        """Remove the pod, whatever it does."""
        await podman("pod", "rm", "--force", "--ignore", self.name, check=False)

    async def confined(self) -> list[str]:
        """Return for each container the user and capabilities of its first process, and if its root is read-only."""
        found = []
        for container in self.pods.containers:
            name, asked = f"{self.name}-{container['name']}", "{{.State.Pid}} {{.HostConfig.ReadonlyRootfs}}"
            pid, readonly = (await podman("inspect", "--format", asked, name)).split()
            found.append(f"{_rights_of(pid)} {readonly}")
        return found


def _hardware_address(address: str) -> str:
    """The same one for each pod at this address. Otherwise the other pods would send to the hardware address of the
    pod that is gone, for half a minute. In a cluster, a new pod has a new address."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _rights_of(pid: str) -> str:
    """Return the effective user and capabilities of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return f"{lines['Uid'].split()[1]} {lines['CapEff'].strip()}"
