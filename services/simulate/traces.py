"""Reads recorded loads. Two formats: Mooncake (JSON lines, with ids of shared prompt blocks) and Azure (CSV).

Mooncake: `timestamp` ms, `input_length`, `output_length` tokens, `hash_ids` of 512-token blocks (Mooncake, FAST'25).
Azure: TIMESTAMP, ContextTokens, GeneratedTokens (Splitwise, ISCA'24). Times start at 0 with the first request.
A malformed line is refused with its number, and nothing is guessed.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from services.simulate.load import Request

MOONCAKE_BLOCK: Final = 512  # tokens a hash id stands for
_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
_MOONCAKE_KEYS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A line that is not of the format; the message begins with the file and the line's number."""


def read_trace(path: Path) -> list[Request]:
    """By the file's ending: .jsonl is Mooncake, .csv is Azure. Raises TraceError; OSError where it can't be read."""
    readers = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: ends in {path.suffix or 'nothing'}; known are {', '.join(readers)}")
    requests: list[Request] = []
    previous = 0
    with path.open(encoding="utf-8", newline="") as file:
        for number, request in reader(path, iter(file)):
            if request.at_ns < previous:
                raise TraceError(f"{path}:{number}: its time is before that of the request above it")
            previous = request.at_ns
            requests.append(request)
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return requests


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Request]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict) or any(key not in entry for key in _MOONCAKE_KEYS):
            raise TraceError(f"{path}:{number}: needs an object with {', '.join(_MOONCAKE_KEYS)}")
        at_ms, prompt, output = (_whole(path, number, key, entry[key]) for key in _MOONCAKE_KEYS[:3])
        blocks = entry["hash_ids"]
        if not isinstance(blocks, list) or any(
            isinstance(block, bool) or not isinstance(block, int) for block in blocks
        ):
            raise TraceError(f"{path}:{number}: hash_ids must be a list of whole numbers")
        if len(blocks) != -(-prompt // MOONCAKE_BLOCK):
            raise TraceError(
                f"{path}:{number}: {len(blocks)} hash_ids; {prompt} tokens are {-(-prompt // MOONCAKE_BLOCK)} blocks"
            )
        yield number, _request(path, number, at_ms * 1_000_000, prompt, output, tuple(blocks))


def _azure(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Request]]:
    header = next(lines, "").strip()
    if header != _AZURE_HEADER:
        raise TraceError(f"{path}:1: the header is {header[:80]!r}, not {_AZURE_HEADER}")
    first: int | None = None
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = line.strip().split(",")
        if len(cells) != 3:
            raise TraceError(f"{path}:{number}: {len(cells)} cells, not 3")
        at_ns = _timestamp(path, number, cells[0])
        first = at_ns if first is None else first
        prompt, output = (
            _whole(path, number, name, int(cell) if cell.isascii() and cell.isdigit() else cell)
            for name, cell in zip(("ContextTokens", "GeneratedTokens"), cells[1:], strict=True)
        )
        if at_ns < first:
            raise TraceError(f"{path}:{number}: its time is before that of the first request")
        yield number, _request(path, number, at_ns - first, prompt, output, ())


def _timestamp(path: Path, number: int, cell: str) -> int:
    """ns. The fraction has 7 digits, more than datetime reads."""
    whole, _, fraction = cell.partition(".")
    try:
        seconds = (datetime.strptime(whole, "%Y-%m-%d %H:%M:%S") - datetime(1970, 1, 1)).total_seconds()
    except ValueError as error:
        raise TraceError(f"{path}:{number}: TIMESTAMP {cell!r} is not YYYY-MM-DD HH:MM:SS.fraction") from error
    if fraction and not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 9):
        raise TraceError(f"{path}:{number}: TIMESTAMP {cell!r} has a fraction that is no number of ns")
    return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))


def _whole(path: Path, number: int, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TraceError(f"{path}:{number}: {name} is {value!r}; a whole number of at least 0 is needed")
    return value


def _request(path: Path, number: int, at_ns: int, prompt: int, output: int, blocks: tuple[int, ...]) -> Request:
    if prompt < 1 or output < 1:
        raise TraceError(f"{path}:{number}: {prompt} tokens in, {output} out; at least 1 each is needed")
    return Request(at_ns, prompt, output, blocks)
