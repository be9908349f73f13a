"""The credit protocol's one codec: Grants and Reports as dataclasses of numpy columns, and their way onto the wire.

Shared by the scheduler, the worker, the paced worker and tests. A decoder ignores columns that it does not know and
refuses unequal lengths. Holds no policy: what to grant is the scheduler's, what to run the worker's.
"""

from quire_common.credit.grant import (
    Budget,
    Grant,
    MoveKind,
    PageMove,
    Start,
    decode_grant,
    decode_move,
    encode_grant,
    encode_move,
    start_bytes,
)
from quire_common.credit.hello import (
    PROTOCOL_VERSION,
    Epoch,
    KvGroup,
    ModelInfo,
    PageGeometry,
    RankAddress,
    SamplingDefaults,
    ShardRange,
    WorkerHello,
)
from quire_common.credit.logprobs import LogprobColumns
from quire_common.credit.prompt_logprobs import PromptLogprobs
from quire_common.credit.report import Report, StepTiming, decode_report, encode_report
from quire_common.finish import Finish

__all__ = [
    "PROTOCOL_VERSION",
    "Budget",
    "Epoch",
    "Finish",
    "Grant",
    "KvGroup",
    "LogprobColumns",
    "ModelInfo",
    "MoveKind",
    "PageGeometry",
    "PageMove",
    "PromptLogprobs",
    "RankAddress",
    "Report",
    "SamplingDefaults",
    "ShardRange",
    "Start",
    "StepTiming",
    "WorkerHello",
    "decode_grant",
    "decode_move",
    "decode_report",
    "encode_grant",
    "encode_move",
    "encode_report",
    "start_bytes",
]
