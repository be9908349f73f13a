"""Codecs and checks of request parameters for services. They convert the numbers of a request between its messages and
its records.

The table of parameters is quire.request_parameters, which the Python client reads too. A record has each number under
the parameter's name; the caller chooses the record's type.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from quire.request_parameters import (
    BY_NAME,
    LIMITS,
    MAX_INT32,
    MODEL_DEFAULTS,
    NUMBERS,
    PARAMETERS,
    PENALTIES,
    SAMPLING_NUMBERS,
    Parameter,
)
from quire.v1 import common_pb2 as pb
from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "BY_NAME",
    "LIMITS",
    "MAX_INT32",
    "MODEL_DEFAULTS",
    "PARAMETERS",
    "PENALTIES",
    "SAMPLING_NUMBERS",
    "NumberCodec",
    "Parameter",
]

_FIELDS: Final = pb.SamplingParams.DESCRIPTOR.fields_by_name


class NumberCodec:
    """Some numbers of a request, at least two, as fields of SamplingParams and of one record."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        numbers = tuple(parameters)
        self._names = tuple(each.name for each in numbers)
        self._values: Callable[[object], tuple[Any, ...]] = attrgetter(*self._names)
        # An absent field of these means the default; one that cannot be absent says it by 0.
        self._unsent = tuple((each.name, _unsent(each)) for each in numbers)
        self._optional = tuple((each.name, each.default) for each in numbers if _FIELDS[each.name].has_presence)
        self._defaults = tuple(each.default for each in numbers)
        self._folded = tuple(each.name for each in numbers if each.kind == "int" and each.low < 0)
        self._bounds = tuple((each.name, each.engine_low, each.high, each.engine_range) for each in numbers)

    def into_pb(self, record: object, message: pb.SamplingParams) -> None:
        """Write the record's numbers into the message, without those that an absent field stands for."""
        for (name, unsent), value in zip(self._unsent, self._values(record), strict=True):
            if value != unsent:
                setattr(message, name, value)

    def from_pb(self, message: pb.SamplingParams) -> dict[str, Any]:
        """Return the numbers of a message by name, unchecked. An absent optional number gets its default, any other
        absent number is 0. If a negative number of a parameter means no limit, it becomes 0."""
        found = dict(zip(self._names, self._values(message), strict=True))
        for name, default in self._optional:
            if not found[name] and not message.HasField(name):
                found[name] = default
        for name in self._folded:
            if found[name] < 0:
                found[name] = 0
        return found

    def asks(self, message: pb.SamplingParams) -> bool:
        """Return whether a message has a number that is not its default. An optional field that is set to 0 counts
        too."""
        values = self._values(message)
        if any(values):
            return values != self._defaults
        for name, _default in self._optional:  # noqa: SIM110 -- most sequences come here: a generator takes twice as long
            if message.HasField(name):
                return True
        return False

    def from_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record's numbers from a request body's checked fields. Where a negative number means that nothing
        is asked, it becomes 0."""
        found = {name: values[name] for name in self._names}
        for name in self._folded:
            found[name] = max(found[name], 0)
        return found

    def check(self, record: object) -> None:
        """Raise InvalidArgument, with the parameter's name, for a number outside the engine's bounds; NaN is outside of
        all."""
        for (name, low, high, range_text), value in zip(self._bounds, self._values(record), strict=True):
            if not low <= value <= high:
                raise InvalidArgument(
                    "BAD_SAMPLING_PARAMETER", f"{name} is {value}.", f"Choose a value {range_text}.", param=name
                )


def _unsent(parameter: Parameter) -> float | None:
    """Return the value that `into_pb` leaves out: 0 for a field that cannot be absent, else the default. None: even the
    default is sent."""
    if not _FIELDS[parameter.name].has_presence:
        return 0
    return None if parameter.always_sent else parameter.default


def check_fields_above_low(values: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for a number of a request body that equals its lower bound, where the bound itself is
    refused."""
    for parameter in NUMBERS:
        if parameter.above_low and values[parameter.name] == parameter.low:
            raise InvalidArgument(
                "OUT_OF_RANGE",
                f"{parameter.name} is {parameter.low:g}.",
                f"Choose a value above {parameter.low:g}; {parameter.instead_of_low}.",
                param=parameter.name,
            )
