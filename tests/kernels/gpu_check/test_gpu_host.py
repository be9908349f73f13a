"""`bench.gpu.host` times the host alone: whatever a step computes with is replaced there.

In a process of its own, since what is replaced stays so, and Triton must not be interpreted.
"""

from __future__ import annotations

import json

from tests.kernels.uninterpreted import run_uninterpreted

_LOOK = """
import json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from bench.gpu import host as gpu_host

class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

def look(body):
    with Watch() as watch, torch.inference_mode():
        for _, step in gpu_host.steps_of(body):
            step()
    return sorted(watch.seen)

real = {name: getattr(owner, name) for owner, name, _ in gpu_host.REPLACED}
gpu_host.stand_in()
with torch.inference_mode():
    body = gpu_host.small_body(layers=2)
found = {"": look(body)}
for owner, name, instead in gpu_host.REPLACED:
    if owner is not gpu_host.JITFunction:
        setattr(owner, name, real[name])
        found[name] = look(body)
        setattr(owner, name, instead)
print(json.dumps(found))
"""
_CHEAP = {
    "slice", "select", "view", "reshape", "transpose", "numpy_T", "empty", "empty_like", "copy_", "fill_", "full",
    "lift_fresh", "to", "add_", "index_select",
}  # fmt: skip  # a list of names


def test_nothing_is_computed_but_by_stand_ins() -> None:
    found = {name: set(seen) - _CHEAP for name, seen in json.loads(run_uninterpreted("-c", _LOOK)).items()}
    assert not found.pop(""), "a step computes what bench.gpu.host should replace"
    # Every stand-in but one is needed: no block of the model ends in a norm, so that all products there are sums.
    assert {name for name, seen in found.items() if seen} == set(found) - {"mm"}
