"""Faults that a test can order: the values of `--paced-fault NAME@STEP`, and their effects on a step.

Steps count from 1 over the life of the process, for all schedulers that connect.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EXIT_DIED = 70


@dataclass(slots=True)
class StepEffect:
    """The effects of faults on one step."""

    extra_ms: float = 0.0
    damaged: bool = False
    """The first sequence that yields a token gets a NaN instead."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One occurrence. `value` is the number after the colon."""

    name: str
    step: int
    value: float = 0.0


def _hang(fault: Fault, effect: StepEffect) -> None:
    threading.Event().wait()


def _die(fault: Fault, effect: StepEffect) -> None:
    os._exit(EXIT_DIED)


def _slow(fault: Fault, effect: StepEffect) -> None:
    effect.extra_ms += fault.value


def _nan(fault: Fault, effect: StepEffect) -> None:
    effect.damaged = True


STEP_FAULTS: dict[str, Callable[[Fault, StepEffect], None]] = {"die": _die, "hang": _hang, "nan": _nan, "slow": _slow}
# These faults change Reports from the step on; faulty_servicer implements them.
SILENT, WRONG_EPOCH = "silent", "wrong-epoch"
REPORT_FAULTS = (SILENT, WRONG_EPOCH)
_WITH_VALUE = ("slow",)
SUPPORTED = "die@N, hang@N, nan@N, silent@N, slow@N:MS and wrong-epoch@N, N being a step from 1"


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Parse the values of --paced-fault; raises ConfigError, which lists the supported faults, for any other text."""
    return tuple(_parse(text) for text in texts)


class StepFaults:
    """The faults that happen while a step runs."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = [fault for fault in faults if fault.name in STEP_FAULTS]

    def apply_faults(self, step: int) -> StepEffect | None:
        """Carry out the faults of this step, and return their effect on the step; None: the step has no fault. Does not
        return if a fault hangs or ends the process."""
        due = [fault for fault in self._faults if fault.step == step]
        if not due:
            return None
        effect = StepEffect()
        for fault in due:
            STEP_FAULTS[fault.name](fault, effect)
        return effect


def _parse(text: str) -> Fault:
    """Parse NAME@STEP or NAME@STEP:VALUE; raises ConfigError BAD_FAULT for an unknown name, a step below 1 or a wrong
    value."""
    name, _, rest = text.partition("@")
    step, colon, value = rest.partition(":")
    try:
        fault = Fault(name, int(step), float(value) if colon else 0.0)
    except ValueError as error:
        raise _bad(text) from error
    known = name in STEP_FAULTS or name in REPORT_FAULTS
    if not known or fault.step < 1 or bool(colon) != (name in _WITH_VALUE) or not 0 <= fault.value < 1e9:
        raise _bad(text)
    return fault


def _bad(text: str) -> ConfigError:
    """Return the error of a --paced-fault that cannot be parsed."""
    return ConfigError(
        "BAD_FAULT", f"--paced-fault {text!r} is not a fault.", f"Supported: {SUPPORTED}.", param="paced_fault"
    )
