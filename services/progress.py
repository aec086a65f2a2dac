"""What a long task reports, and how a terminal shows it.

Owns: the one type of a progress report, and its drawing. Must not know: what the task does.
Invariant: a terminal gets one line that is redrawn; anything else (a file, a pipe, CI) gets whole plain lines, few.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, TypeAlias


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` bytes of the stage called `stage`. total 0: nothing to count, the stage just goes on."""

    stage: str
    done: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        return 100 * min(self.done, self.total) // self.total if self.total else 0


Report: TypeAlias = Callable[[Progress], None]


class TerminalProgress:
    """A `Report` that draws on a text stream. Call `finish` (or leave the `with` block) to end the last line."""

    PLAIN_STEP_PERCENT = 25

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._redraws = stream.isatty()
        self._shown: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        step = 1 if self._redraws else self.PLAIN_STEP_PERCENT
        key = (progress.stage, progress.percent // step)
        if key == self._shown:
            return
        if self._redraws:
            self._redraw(progress)
        else:
            print(plain_line(progress), file=self._stream, flush=True)
        self._shown = key

    def finish(self) -> None:
        if self._redraws and self._shown is not None:
            print(file=self._stream, flush=True)
        self._shown = None

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _redraw(self, progress: Progress) -> None:
        if self._shown is not None and self._shown[0] != progress.stage:
            print(file=self._stream)
        line = bar_line(progress, shutil.get_terminal_size().columns)
        self._stream.write(f"\r\x1b[2K{line}")
        self._stream.flush()


def plain_line(progress: Progress) -> str:
    if not progress.total:
        return progress.stage
    return f"{progress.stage}: {progress.percent} % of {megabytes(progress.total)}"


def bar_line(progress: Progress, columns: int) -> str:
    """At most `columns` - 1 characters, so that the terminal never wraps the line that it redraws."""
    if not progress.total:
        return progress.stage[: columns - 1]
    tail = f" {progress.percent:3d} % {megabytes(progress.done)} of {megabytes(progress.total)}"
    width = max(0, min(40, columns - len(progress.stage) - len(tail) - 4))
    filled = width * progress.percent // 100
    return f"{progress.stage} [{'#' * filled}{'.' * (width - filled)}]{tail}"[: columns - 1]


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
