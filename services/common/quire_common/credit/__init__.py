"""The only codec of the credit protocol: Grants and Reports as dataclasses of numpy columns, and their protobuf form.

The scheduler, the worker, the paced worker and tests share it. A decoder ignores columns that it does not know, and
refuses columns of unequal lengths. It holds no policy: the scheduler decides about Grants, and the worker about its
steps.
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
