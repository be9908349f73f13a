"""One line per member while a stack starts. On a terminal the lines are updated in place; elsewhere a line is printed
when a member arrives at a phase."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from quire.cli.output.terminal import bar, paint
from quire.local import events

_BAR_WIDTH = 16


class ProgressLines:
    """Shows the progress of a stack's members. Call the object with every event of the stack. `members` are in the
    order in which they are started."""

    def __init__(self, members: Sequence[str], stream: TextIO | None = None) -> None:
        self._shown = tuple(reversed(members))
        self._width = max(map(len, members))
        self._up = False
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._last: dict[str, events.Progress] = {}
        self._drawn = False

    def __call__(self, event: events.Event) -> None:
        """Show an event. Progress is shown until the stack is ready: on a terminal all lines are redrawn, elsewhere a
        member's new phase is printed, except `starting`. Deaths, with fix and log, and restarts are printed at any
        time. Other events print nothing."""
        if isinstance(event, events.Ready):
            self._up = True
        elif isinstance(event, events.Restarted):
            times = "once" if event.restarts == 1 else f"{event.restarts} times"
            print(
                paint(f"the {event.service} serves again, restarted {times}", "green", self._stream), file=self._stream
            )
        elif isinstance(event, events.Progress) and not self._up:
            before = self._last.get(event.service)
            self._last[event.service] = event
            if self._live:
                self._redraw()
            elif before is None or before.phase != event.phase:
                self._arrive(event)
        elif isinstance(event, events.Died):
            print(paint(f"the {event.service} died: {event.message}", "red", self._stream), file=self._stream)
            print(f"  fix     {event.fix}\n  log     {event.log}", file=self._stream)
            then = f"is started again in {event.restart_in_s:.1f} s" if event.restart_in_s >= 0 else "stays down"
            print(f"  it      {then}", file=self._stream, flush=True)

    def _arrive(self, event: events.Progress) -> None:
        """Without a terminal, print a line for an event of any phase but `starting`."""
        if event.phase != "starting":
            print(self._line(event), file=self._stream, flush=True)

    def _redraw(self) -> None:
        """Draw the lines of all members over the old ones, the first started at the bottom. A member without an event
        has only its name."""
        if self._drawn:
            self._stream.write(f"\x1b[{len(self._shown)}A")
        for service in self._shown:
            event = self._last.get(service)
            self._stream.write(f"\x1b[2K{self._line(event) if event else f'  {service}'}\n")
        self._stream.flush()
        self._drawn = True

    def _line(self, event: events.Progress) -> str:
        """Return a member's line: name, phase in colour, seconds and, until it is ready, a bar if its progress is
        known, and the detail."""
        ready = event.phase == "ready"
        phase = paint(f"{event.phase:<12}", "green" if ready else "yellow", self._stream)
        line = f"  {event.service:<{self._width}} {phase} {event.seconds:5.1f} s"
        if not ready and event.progress >= 0:
            line += f"  {bar(event.progress, _BAR_WIDTH)} {event.progress:4.0%}"
        return f"{line}  {event.detail}".rstrip() if not ready else line
