"""The inside of a process that may be killed: it reads messages from standard input and answers each.

Owns the form of a message, the limits of the process, and that it ends with its input. Must not know gRPC or what the
messages mean. A message is two lengths of 4 bytes, then JSON (head), then raw bytes (body).
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

MEMORY_BYTES: Final = 2 << 30  # of addresses, the interpreter's own among them
ORPHAN_S: Final = 2.0  # beyond the limit of one answer: by then nobody is left who would have killed it
_LENGTHS: Final = struct.Struct("=II")
LENGTHS_BYTES: Final = _LENGTHS.size


@dataclass(frozen=True, slots=True)
class Message:
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def pack(message: Message) -> bytes:
    head = json.dumps(message.head).encode()
    return _LENGTHS.pack(len(head), len(message.body)) + head + message.body


def unpack_lengths(raw: bytes) -> tuple[int, int]:
    head, body = _LENGTHS.unpack(raw)
    return int(head), int(body)


def unpack(head: bytes, body: bytes) -> Message:
    return Message(json.loads(head), body)


def pack_texts(texts: Iterable[str | None]) -> tuple[list[int], bytes]:
    """Lengths in bytes of UTF-8 (-1: None), and all texts as one. A head takes the first, a body the second."""
    raw = [None if text is None else text.encode("utf-8") for text in texts]
    return [-1 if one is None else len(one) for one in raw], b"".join(one for one in raw if one is not None)


def unpack_texts(lengths: Sequence[int], body: bytes) -> list[str | None]:
    texts: list[str | None] = []
    end = 0
    for length in lengths:
        texts.append(None if length < 0 else body[end : end + length].decode("utf-8"))
        end += max(0, length)
    return texts


def work(begin: Callable[[Message], Callable[[Message], Message]]) -> None:
    """Serves until the input ends. begin: is given the first message, and gives what answers the others."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    opening = _read(sys.stdin.buffer)
    if opening is None:
        return
    alarm_s = float(opening.head["answer_s"]) + ORPHAN_S
    answer = begin(opening)
    _write(Message())
    while (asked := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # its default action ends the process, in C code too
        _write(answer(asked))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(stream: BinaryIO) -> Message | None:
    """None at the end."""
    lengths = stream.read(LENGTHS_BYTES)
    if len(lengths) < LENGTHS_BYTES:
        return None
    head, body = unpack_lengths(lengths)
    return unpack(stream.read(head), stream.read(body))


def _write(message: Message) -> None:
    sys.stdout.buffer.write(pack(message))
    sys.stdout.buffer.flush()
