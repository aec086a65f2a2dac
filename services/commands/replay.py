"""`tercet replay FILE`: makes the calls of a recording again and compares every answer.

Exit code 0: all answers are equal; 1: one differs, or the file can't be read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from services.scheduler.record import BadRecording, Difference, replay

SHOWN: Final = 2000  # characters of an answer


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="as written by `tercet scheduler --record FILE`")
    chosen = parser.parse_args(argv)
    try:
        replayed = replay(chosen.file)
    except (BadRecording, OSError) as error:
        print(f"tercet replay: {error}", file=sys.stderr)
        return 1
    if replayed.difference is not None:
        print("\n".join(_told(replayed.difference)))
        return 1
    note = "; the last line is not whole, as after a kill" if replayed.cut else ""
    print(f"{replayed.calls} calls, every answer equal{note}")
    return 0


def _told(difference: Difference) -> list[str]:
    call = difference.call
    arguments = ", ".join(map(repr, call.arguments))
    return [
        f"line {call.line}: {call.verb}({arguments})"[:SHOWN],
        f"recorded: {_text(call.answer)}",
        f"given:    {_text(difference.given)}",
    ]


def _text(answer: Any) -> str:
    text = json.dumps(answer)
    return text if len(text) <= SHOWN else text[:SHOWN] + " [cut]"
