"""What a run sends: stages, each a load at one level. Reads trace files; sends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from services.simulate.load import Arrivals, Lengths, Request, generate, lengths_of, reshaped
from services.simulate.traces import read_trace

LEAST_REQUESTS: Final = 4
OPEN_SECONDS: Final = 30  # of arrivals, where the number of requests is not given
WARM_UP_OUTPUT: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides what is sent and how it is judged: runs can be compared where these are equal.

    tiers: prompt lengths. concurrency: clients of each closed loop. rates: requests a second of each open loop. trace:
    replayed, its times divided by scale. lengths_from: a trace that lengths are drawn from, not tiers and output.
    requests: of a stage; None: as many as clients and at least 4, or 30 s of arrivals. warm_up: requests before each
    stage that are not counted; None: as many as clients. shared_prefix: tokens. timeout_s: of a request.
    """

    tiers: tuple[int, ...] = (128,)
    output: int = 128
    concurrency: tuple[int, ...] = (1, 8)
    rates: tuple[float, ...] = ()
    trace: str | None = None
    scale: float = 1.0
    lengths_from: str | None = None
    first: int | None = None
    length_divisor: int = 1
    requests: int | None = None
    warm_up: int | None = None
    repeats: int = 3
    shared_prefix: int = 0
    chat: bool = False
    temperature: float = 0.0
    seed: int = 1
    timeout_s: float = 300.0
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """name: of the lengths. clients: of a closed loop; rate: requests a second of an open one."""

    name: str
    requests: tuple[Request, ...]
    warm_up: tuple[Request, ...]
    clients: int | None = None
    rate: float | None = None

    @property
    def level(self) -> float:
        return self.clients if self.clients is not None else self.rate or 0.0

    @property
    def load(self) -> str:
        if self.clients is not None:
            return f"{self.clients} at once"
        return f"{self.rate:.3g}/s"


def stages(settings: Settings) -> list[Stage]:
    """In the order in which they run. Raises LoadError, TraceError, OSError."""
    if settings.trace is not None:
        return [_replay(settings, settings.trace)]
    if settings.rates:
        return [_open(settings, shape, rate) for shape, rate in product(_shapes(settings), settings.rates)]
    return [_closed(settings, shape, clients) for shape, clients in product(_shapes(settings), settings.concurrency)]


def longest(planned: Sequence[Stage]) -> int:
    """Tokens of the longest request, in and out."""
    return max(one.prompt_len + one.output_len for stage in planned for one in stage.requests)


@dataclass(frozen=True, slots=True)
class _Shape:
    """lengths: made anew for each stage, since those drawn from a trace have a state."""

    name: str
    lengths: Callable[[], tuple[Lengths, Lengths]]


def _shapes(settings: Settings) -> list[_Shape]:
    if settings.lengths_from is not None:
        path = Path(settings.lengths_from)
        drawn = reshaped(read_trace(path), length_divisor=settings.length_divisor, limit=settings.first)
        return [_Shape(path.name, lambda: lengths_of(drawn, settings.seed))]
    return [_fixed(tier, settings.output) for tier in settings.tiers]


def _fixed(prompt: int, output: int) -> _Shape:
    return _Shape(f"{prompt} in, {output} out", lambda: (lambda _: prompt, lambda _: output))


def _closed(settings: Settings, shape: _Shape, clients: int) -> Stage:
    count = settings.requests or max(LEAST_REQUESTS, clients)
    requests = _requests(settings, shape, count, 1.0)
    return Stage(shape.name, requests, _warm_up(settings, requests, clients), clients=clients)


def _open(settings: Settings, shape: _Shape, rate: float) -> Stage:
    count = settings.requests or max(2 * LEAST_REQUESTS, round(OPEN_SECONDS * rate))
    requests = _requests(settings, shape, count, rate)
    return Stage(shape.name, requests, _warm_up(settings, requests, LEAST_REQUESTS), rate=rate)


def _requests(settings: Settings, shape: _Shape, count: int, rate: float) -> tuple[Request, ...]:
    prompts, outputs = shape.lengths()
    return tuple(generate(count, Arrivals(rate), prompts, outputs, settings.seed))


def _replay(settings: Settings, trace: str) -> Stage:
    requests = tuple(
        reshaped(
            read_trace(Path(trace)),
            rate_scale=settings.scale,
            length_divisor=settings.length_divisor,
            limit=settings.first,
        )
    )
    seconds = (requests[-1].at_ns - requests[0].at_ns) / 1e9
    rate = len(requests) / seconds if seconds else float(len(requests))
    return Stage(Path(trace).name, requests, _warm_up(settings, requests, LEAST_REQUESTS), rate=rate)


def _warm_up(settings: Settings, requests: Sequence[Request], default: int) -> tuple[Request, ...]:
    """Prompts like the stage's, with short answers and nothing shared with what is measured."""
    count = default if settings.warm_up is None else settings.warm_up
    likes = [requests[index % len(requests)] for index in range(count)]
    return tuple(Request(0, like.prompt_len, min(like.output_len, WARM_UP_OUTPUT)) for like in likes)
