"""Recordings of a core: every call with its answer, one JSON list a line, behind a first line with the configuration.

Owns the file's form, its writer and its replay. A recording holds lengths, times, ids of requests and tenants, and
hashes of blocks: no token ids, no text. Invariant: the recorder never delays the core's caller by more than the price
of a queue's put: what is recorded is immutable, and encoded and written on a thread of its own. Where that thread falls
behind too far the recording ends there, and says so: one with a gap could not be replayed.
"""

import dataclasses
import gzip
import json
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from services.scheduler.core import calls, cost
from services.scheduler.core import limits as core_limits
from services.scheduler.core.calls import CoreConfig, OutOfStep, PlannedSlice, SequenceOutcome, SubmitError
from services.scheduler.core.core import SchedulerCore

VERSION: Final = 1
WAITING_MOST: Final = 65_536  # calls that wait to be written
CLOSE_S: Final = 10.0
UNRECORDED: Final = frozenset({"check"})
TYPES: Final[Mapping[str, Any]] = {
    name: kind
    for module in (calls, core_limits, cost)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "_field_defaults"))
}

log = logging.getLogger(__name__)


class BadRecording(Exception):
    """The file is no recording that this build can read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Call:
    """line: in the file, from 1. answer: as it is written there."""

    line: int
    verb: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    answer: Any


@dataclass(frozen=True, slots=True)
class Difference:
    call: Call
    given: Any


@dataclass(frozen=True, slots=True)
class Replayed:
    """calls: that were made. cut: the file ends in the middle of a line, as that of a killed process does."""

    calls: int
    cut: bool
    difference: Difference | None


def encode(value: object) -> Any:
    """As JSON: {type: {field: value}} with defaults left out, {enum: value}, {"bytes": hex}, {"map": pairs}."""
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if field.default is dataclasses.MISSING or held != field.default:
                fields[field.name] = encode(held)
        return {type(value).__name__: fields}
    if isinstance(value, PlannedSlice | SequenceOutcome):
        defaults = value._field_defaults
        named = value._asdict().items()
        return {
            type(value).__name__: {
                name: encode(part) for name, part in named if name not in defaults or part != defaults[name]
            }
        }
    if isinstance(value, SubmitError):
        return {type(value).__name__: [value.field, value.message]}
    if isinstance(value, Exception):
        return {type(value).__name__: [str(value)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"map": [[encode(key), encode(held)] for key, held in value.items()]}
    if isinstance(value, list | tuple):
        return [encode(part) for part in value]
    return value


def decode(value: Any) -> Any:
    """Of arguments: lists become tuples."""
    if isinstance(value, list):
        return tuple(decode(part) for part in value)
    if not isinstance(value, dict):
        return value
    [(name, held)] = value.items()
    if name == "bytes":
        return bytes.fromhex(held)
    if name == "map":
        return {decode(key): decode(part) for key, part in held}
    kind = TYPES[name]
    return kind(**{key: decode(part) for key, part in held.items()}) if isinstance(held, dict) else kind(held)


class Recorder:
    """`with Recorder(path, config) as recorder: core.listener = recorder.note`. A path that ends in .gz is packed."""

    def __init__(self, path: Path, config: CoreConfig, waiting_most: int = WAITING_MOST) -> None:
        self._waiting: queue.Queue[tuple[str, tuple[object, ...], Mapping[str, object], object] | None] = queue.Queue(
            waiting_most
        )
        self._file = _open(path, "wt")
        self._file.write(_line({"tercet_recording": VERSION, "config": encode(config)}))
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self.ended = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = True
        self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    def note(self, verb: str, arguments: tuple[object, ...], options: Mapping[str, object], answer: object) -> None:
        if self.ended or verb in UNRECORDED:
            return
        try:
            self._waiting.put_nowait((verb, arguments, options, answer))
        except queue.Full:
            self.ended = True
            log.error("the recording ends here: its file is written too slowly", extra={"file": self._file.name})

    def _write(self) -> None:
        try:
            with self._file:
                while (call := self._waiting.get()) is not None:
                    verb, arguments, options, answer = call
                    self._file.write(_line([verb, encode(arguments), encode(options), encode(answer)]))
                    if self._waiting.empty():
                        self._file.flush()
        except OSError as error:
            self.ended = True
            log.error("the recording ends here", extra={"reason": str(error)})


def replay(path: Path) -> Replayed:
    """Makes the calls of a recording, up to the first answer that differs. Raises BadRecording or OSError."""
    lines = _lines(path)
    core = SchedulerCore(_header(next(lines, "")))
    made, cut = 0, False
    for number, text in enumerate(lines, start=2):
        if not text.endswith("\n"):
            cut = True
            break
        call = _call(number, text)
        made += 1
        given = json.loads(json.dumps(encode(_answer(core, call))))
        if given != call.answer:
            return Replayed(made, cut, Difference(call, given))
        core.take_kv_events()
    return Replayed(made, cut, None)


def _answer(core: SchedulerCore, call: Call) -> Any:
    try:
        return getattr(core, call.verb)(*call.arguments, **call.options)
    except (SubmitError, OutOfStep, ValueError) as refusal:
        return refusal


def _header(text: str) -> CoreConfig:
    try:
        header = json.loads(text)
        version = header["tercet_recording"]
        if version != VERSION:
            raise BadRecording(f"line 1: form {version} of a recording; this build reads {VERSION}")
        config = decode(header["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecording(f"line 1 is not the start of a recording: {error}") from error
    if not isinstance(config, CoreConfig):
        raise BadRecording("line 1 holds no configuration of a core")
    return config


def _call(number: int, text: str) -> Call:
    try:
        verb, arguments, options, answer = json.loads(text)
        call = Call(number, verb, decode(arguments), dict(decode(options)), answer)
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecording(f"line {number} is not a call: {error}") from error
    if verb.startswith("_") or not callable(getattr(SchedulerCore, verb, None)):
        raise BadRecording(f"line {number}: the core has no verb {verb!r}")
    return call


def _lines(path: Path) -> Iterator[str]:
    with _open(path, "rt") as file:
        try:
            yield from file
        except EOFError:
            return  # a packed file whose writer was killed


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=3, encoding="utf-8", newline="\n")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8", newline="\n")  # closed by whoever asked


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
