"""What is shown while requests run: a bar on a terminal, a line a stage elsewhere."""

import shutil
from typing import TextIO

from services.bench.document import StageResult
from services.bench.drive import Tell, clock
from services.bench.plan import Stage
from services.bench.record import Outcome
from services.plots.table import number

WIDTH = 30


class StageProgress:
    """`begin(stage, repeat)` gives who is told each outcome."""

    def __init__(self, stream: TextIO, repeats: int) -> None:
        self._stream = stream
        self._repeats = repeats
        self._redraws = stream.isatty()

    def begin(self, stage: Stage, repeat: int) -> Tell:
        began, done, tokens = clock(), 0, 0
        name = f"{stage.name}, {stage.load}, {repeat + 1}/{self._repeats}"

        def tell(outcome: Outcome) -> None:
            nonlocal done, tokens
            done += 1
            tokens += outcome.reply.output
            if self._redraws:
                rate = tokens / max(clock() - began, 1) * 1e9
                self._draw(bar(name, done, len(stage.requests), rate, shutil.get_terminal_size().columns))

        if self._redraws:
            self._draw(bar(name, 0, len(stage.requests), 0.0, shutil.get_terminal_size().columns))
        return tell

    def ended(self, result: StageResult) -> None:
        found = result.figures
        line = (
            f"{result.name}, {result.load}, {result.repeat + 1}/{self._repeats}: "
            f"{found.served} of {found.requests} served, "
            f"{number(found.output_tokens_per_s)} output tokens/s, TTFT P50 {number(found.ttft.p50)} ms, "
            f"TPOT P50 {number(found.tpot.p50)} ms"
        )
        if self._redraws:
            self._stream.write("\r\x1b[2K")
        print(line, file=self._stream, flush=True)

    def _draw(self, line: str) -> None:
        self._stream.write(f"\r\x1b[2K{line}")
        self._stream.flush()


def bar(name: str, done: int, total: int, rate: float, columns: int) -> str:
    """At most `columns` - 1 characters, so that the terminal never wraps the line that is redrawn."""
    filled = WIDTH * done // max(total, 1)
    return f"{name} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}  {rate:.0f} tokens/s"[: columns - 1]
