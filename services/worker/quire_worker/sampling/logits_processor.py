"""LogitsProcessor: the interface by which an installed package changes the logits of requests that name it, and its
lookup.

A package registers a factory under a name, in the entry-point group `quire.logits_processors`. --logits-processors
lists the registered names that a worker loads. A request only supplies the name, never code.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from quire_worker.arrays import Float32, Int32

GROUP = "quire.logits_processors"


class LogitsProcessor(Protocol):
    """Called before each token of a request that names it, but for those that a spent thinking budget forces, on the
    thread that runs steps. All sequences wait while it runs.

    A processor must be pure: the same ids and logits must give the same result, independent of earlier and other calls.
    A request may move to another worker between two tokens, and this must not change its answer.
    """

    def __call__(self, prompt_ids: Int32, output_ids: Int32, logits: Float32) -> Float32:
        """Return the row [vocabulary] to sample from: `logits`, changed in place, or another array of the same shape.

        `logits` has the request's own masks and biases, and not yet its penalties; -inf forbids a token. A processor
        must not write to the ids. If a processor raises an error, or returns NaN or +inf, only this request fails.
        """


class MakeLogitsProcessor(Protocol):
    """The factory that an entry point names. Called once, when the worker starts."""

    def __call__(self, model: Path) -> LogitsProcessor:
        """`model` is the model's folder, from which a processor may read the tokenizer."""


LogitsProcessors = Mapping[str, LogitsProcessor]


def load_processors(names: Sequence[str], model: Path) -> dict[str, LogitsProcessor]:
    """Load the named logits processors from the entry points of installed packages, and make each for the model's
    folder. Returns the processors by name. Raises ConfigError for a processor that is not installed or cannot be
    made."""
    registered = {point.name: point for point in entry_points(group=GROUP)} if names else {}
    found: dict[str, LogitsProcessor] = {}
    for name in names:
        if name not in registered:
            known = ", ".join(sorted(registered)) or "none"
            raise ConfigError(
                "LOGITS_PROCESSOR_MISSING",
                f"No installed package has a logits processor {name!r}.",
                f"Install the package that does; registered in {GROUP}: {known}.",
                param="logits_processors",
            )
        try:
            found[name] = registered[name].load()(model)
        except Exception as error:
            raise ConfigError(
                "LOGITS_PROCESSOR_BROKEN",
                f"The logits processor {name!r} ({registered[name].value}) cannot be made: {error!r}.",
                "Mend the package, or leave the name out.",
                param="logits_processors",
            ) from error
    return found
