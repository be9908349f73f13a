"""Target: frames on a data connection of a kvstore, most of them genuine, so that what they say is looked at."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import HEAD_BYTES, DataConnectionError, FrameKind
from quire_kvstore.server import KvstoreService
from tests.contract.kvstore.data_client import DataClient
from tests.fuzz.changes.byte_changes import NUMBERS, changed_bytes
from tests.fuzz.target import Finding, Outcome, Target
from tests.unit.kvstore.pages import BODY_BYTES, chain, config, framed, put

if TYPE_CHECKING:
    from pathlib import Path

_GENUINE, _FORGED, _RAW = 0, 1, 2
_STEP = struct.Struct("<BBBIQ128sH")
"""The origin of a frame, its kind, whether it is the last part, page, offset, page header, length of the payload."""
_CLIENT_KINDS = [FrameKind.GET, FrameKind.PUT, FrameKind.DAMAGED, FrameKind.MAP, FrameKind.TAKE, FrameKind.LEND]


class DataPortTarget(Target):
    """The data port over TCP. An input is a list of frames that one connection sends: genuine, with a wrong tag, or raw
    bytes. The store answers, refuses, or ends the connection; its pages stay right."""

    covers = ("kvstore/quire_kvstore/data/data_session.py", "common/quire_common/kv_data")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._service = KvstoreService(config(64, sweep_s=0.05, data_idle_s=2.0, transfer_timeout_s=2.0))
        self._service.start()
        self.closing.callback(self._service.close)
        self.closing.callback(lambda: self._service.drain(10))
        self._store = self._service.store
        self._run = chain("fuzz", 2)
        self._new = chain("new", 2)
        assert put(self._store, self._run) == (2, 0)

    def seeds(self) -> list[bytes]:
        page = framed(self._new, 0)
        get = _step(FrameKind.GET, payload=struct.pack("<2i", 0, 1))
        whole = _step(FrameKind.PUT, last=True, header=page[:128], payload=page[128:])
        parts = [
            _step(FrameKind.PUT, header=page[:128], payload=page[128:500]),
            _step(FrameKind.PUT, last=True, header=page[:128], payload=page[500:], offset=500 - 128),
        ]
        return [
            b"\0" + get,
            b"\0" + get + get,
            b"\1" + whole,
            b"\1" + b"".join(parts),
            b"\0" + _step(FrameKind.DAMAGED, page=1),
        ]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        steps = _steps(data)
        if not steps:
            return self.seeds()[0]
        at = choose.randrange(len(steps))
        how, kind, last, page, offset, header, payload = steps[at]
        match choose.randrange(8):
            case 0:
                how = choose.choice((_GENUINE, _GENUINE, _FORGED, _RAW))
            case 1:
                kind = choose.choice([*_CLIENT_KINDS, *FrameKind])
            case 2:
                page = choose.choice(NUMBERS) & 0xFFFFFFFF
            case 3:
                offset = choose.choice((*NUMBERS, BODY_BYTES, BODY_BYTES - 1))
            case 4:
                payload = changed_bytes(payload, choose)[:4096]
            case 5:
                header = changed_bytes(header, choose)[:128].ljust(128, b"\0")
            case 6:
                last = 1 - last
            case _:
                steps.insert(at, steps[at])
        steps[at] = how, kind, last, page, offset, header, payload
        lease = choose.choice((0, 1)) if choose.random() < 0.05 else data[0]
        return bytes([lease]) + b"".join(_pack(*step) for step in steps[:8])

    def run(self, data: bytes) -> Outcome:
        steps = _steps(data)
        if not steps:
            return Outcome.UNREADABLE
        if data[0] % 2:
            _, lease, _ = self._store.begin_put(self._new, BODY_BYTES, 0)
        else:
            _, lease = self._store.lookup(self._run, 0, pin=True)
        if lease is None:
            raise Finding("the store gave no lease: pages of ours are gone")
        try:
            with DataClient(("127.0.0.1", self._service._data.port), lease.key) as client:
                outcome = self._talk(client, steps)
        finally:
            self._store.release([lease.id])
        if self._store.lookup(self._run, 0, pin=False)[0] != 2:
            raise Finding("a page that nobody damaged is gone")
        return outcome

    def _talk(self, client: DataClient, steps: list[_Parts]) -> Outcome:
        raw = all(how == _RAW for how, *_ in steps)
        outcome = Outcome.ACCEPTED
        try:
            for how, kind, last, page, offset, header, payload in steps:
                if how == _RAW:
                    client.connection.sock.sendall((header + payload).ljust(HEAD_BYTES + 32, b"\0"))
                else:
                    number = kind if kind in set(FrameKind) else int(FrameKind.END)
                    sent = payload if how == _GENUINE else payload[:-1] + b"?"
                    client.send(FrameKind(number), sent, page=page, offset=offset, last=bool(last), header=header)
                    if how == _FORGED:
                        client.handle = bytes(16)
            client.connection.sock.shutdown(1)
            while (frame := client.arrived()) is not None:
                head = client.connection.verify_head(frame, client.seals)
                if head.kind is FrameKind.REFUSED:
                    outcome = Outcome.REFUSED
                payload = bytes(head.length)
                if head.length:
                    client.connection.receive_payload(frame, client.seals, memoryview(bytearray(head.length)))
        except (OSError, DataConnectionError):
            outcome = Outcome.REFUSED
        return Outcome.UNREADABLE if raw else outcome


_Parts = tuple[int, int, int, int, int, bytes, bytes]


def _step(
    kind: FrameKind, *, last: bool = False, page: int = 0, offset: int = 0, header: bytes = b"", payload: bytes = b""
) -> bytes:
    return _pack(_GENUINE, kind, int(last), page, offset, header.ljust(128, b"\0"), payload)


def _pack(how: int, kind: int, last: int, page: int, offset: int, header: bytes, payload: bytes) -> bytes:
    return _STEP.pack(how, kind, last, page, offset, header, len(payload)) + payload


def _steps(data: bytes) -> list[_Parts]:
    """The frames of an input, as far as they go."""
    at, found = 1, list[_Parts]()
    while at + _STEP.size <= len(data) and len(found) < 8:
        how, kind, last, page, offset, header, length = _STEP.unpack_from(data, at)
        at += _STEP.size
        found.append((how % 3, kind, last, page, offset, header, data[at : at + length]))
        at += length
    return found
