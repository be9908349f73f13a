"""`kv_transfer_params`: vLLM's interface with which a client lets one engine prefill a prompt and another engine decode
it.

The first request has `do_remote_decode`. Its answer contains an object, and the second request sends this object back
unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_router.front.parameters.fields import check_fields
from quire_router.front.parameters.tables import KV_TRANSFER
from quire_router.sequences.job import KvSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.sequences.job import GenerateJob
    from quire_router.sequences.kv_route import KvOffer

PARAM = "kv_transfer_params"


def with_kv_transfer(job: GenerateJob, asked: Mapping[str, Any] | None, *, stream: bool) -> GenerateJob:
    """Return the job changed as the object `asked` says: with `do_remote_decode`, the job's pages are exported; with
    `do_remote_prefill`, the job's pages are pulled from a source. Unchanged if `asked` sets neither. Raises
    InvalidArgument for unknown or wrong fields, for both together, for several prompts or beams, for a bad source, and
    for an export that `check_export` refuses, as that of a `stream`."""
    if asked is None:
        return job
    values = check_fields(asked, KV_TRANSFER)
    export, pulls = values["do_remote_decode"], values["do_remote_prefill"]
    if not export and not pulls:
        return job
    if export and pulls:
        raise _refused("CONTRADICTION", "do_remote_decode and do_remote_prefill exclude each other.", "Set one.")
    if len(job.prompts) > 1 or job.beams:
        raise _refused("TOO_MANY_SEQUENCES", f"{PARAM} is of one prompt, and no beams.", "Send one prompt at a time.")
    if export:
        check_export(job, stream=stream)
        return replace(job, kv_export=True)
    return replace(job, kv_source=_source(values))


def check_export(job: GenerateJob, *, stream: bool) -> None:
    """Raise InvalidArgument for a job whose pages cannot be exported, because it has several sequences or is a
    stream."""
    if job.siblings > 1:
        raise _refused("TOO_MANY_SEQUENCES", "do_remote_decode is of one sequence.", "Ask for one; decode as many.")
    if stream:
        raise _refused("STREAM_ON", "What do_remote_decode answers is an object.", "Set stream to false.")


def kv_transfer_object(offer: KvOffer | None) -> dict[str, Any] | None:
    """Return the object with which a second request can pull the offered pages; None without an offer. Block ids are
    plain numbers within the transfer, and not the engine's own ids."""
    if offer is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine,
        "remote_request_id": offer.transfer_id.hex(),
        "remote_block_ids": list(range(offer.pages)),
        "remote_num_tokens": offer.tokens,
        "remote_host": offer.host,
        "remote_port": offer.port,
        "tp_size": offer.ranks,
    }


def _source(values: Mapping[str, Any]) -> KvSource:
    """Return where the pages of the prefill are, according to the fields. Raises InvalidArgument if the engine's or the
    transfer's id is missing or blank, or if the transfer's id is not hexadecimal."""
    for name in ("remote_engine_id", "remote_request_id"):
        if not (values[name] or "").strip():
            raise InvalidArgument(
                "MISSING_FIELD",
                f"{PARAM} has no {name}.",
                "Send the object of the prefill's answer as it is.",
                param=name,
            )
    try:
        transfer_id = bytes.fromhex(values["remote_request_id"])
    except ValueError:
        raise InvalidArgument(
            "BAD_TRANSFER_ID",
            "remote_request_id is not a hexadecimal number.",
            "Send the object of the prefill's answer as it is.",
            param="remote_request_id",
        ) from None
    return KvSource(values["remote_engine_id"], transfer_id, values["remote_host"], values["remote_port"])


def _refused(code: str, message: str, fix: str) -> InvalidArgument:
    return InvalidArgument(code, message, fix, param=PARAM)
