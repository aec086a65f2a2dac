"""Fits a cost model to a running chain: sends probe requests through the SDK, measures what a user sees.

Owns probes and fit. Two kinds of probe. Prompts of growing length, one at a time, one token out: their first token
takes a whole prompt's steps. Batches of growing size that decode, on short and long prompts: the time between tokens
is one step's. The fit is linear least squares over relative errors, no coefficient below 0.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import tercet
from services.simulate.cost import CostModel, chunk_context

PROMPTS: Final = (16, 64, 128, 256, 512, 1024, 1536)  # tokens, a request alone
BATCHES: Final = ((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (1, 768), (4, 768))  # streams, prompt tokens of each
DECODED: Final = 40  # tokens of each stream
BATCH_TOKENS: Final = 512  # of a step, while a request is alone
REPEATS: Final = 3  # of a prompt; the shortest counts, since a disturbance only adds
_FIRST_ID: Final = 1000  # below are control tokens of most vocabularies


class CalibrationError(Exception):
    """The chain can't be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Coefficients of (base, prefill token, decode row, prefill context, decode context, request), and what was
    measured, ns."""

    weights: tuple[float, ...]
    measured_ns: float


async def calibrate(target: str, tell: Callable[[str], None], seed: int = 1) -> CostModel:
    """Takes some two minutes on a small machine; the chain should have nothing else to do. Raises CalibrationError."""
    source = random.Random(seed)
    probes: list[Probe] = []
    try:
        async with tercet.AsyncClient(target) as client:
            described = await client.describe()
            await _first_token(client, _prompt(source, described, 64))  # warm
            for length in PROMPTS:
                if length + 1 > described.max_model_len:
                    continue
                times = [await _first_token(client, _prompt(source, described, length)) for _ in range(REPEATS)]
                probes.append(prompt_probe(length, min(times)))
                tell(f"prompt of {length:>5}: first token after {probes[-1].measured_ns / 1e6:.1f} ms")
            for streams, length in BATCHES:
                if length + DECODED > described.max_model_len:
                    continue
                prompts = [_prompt(source, described, length) for _ in range(streams)]
                probes.append(batch_probe(streams, length, await _between_tokens(client, prompts)))
                tell(f"{streams:>3} streams at {length:>4}: {probes[-1].measured_ns / 1e6:.1f} ms a step")
    except tercet.TercetError as error:
        raise CalibrationError(f"{target}: {error}") from error
    return fit(probes)


def prompt_probe(length: int, measured_ns: float) -> Probe:
    steps = -(-length // BATCH_TOKENS)
    return Probe((steps, length, 0, chunk_context(0, length), 0, 1), measured_ns)


def batch_probe(streams: int, length: int, measured_ns: float) -> Probe:
    """In the middle of its decoding."""
    return Probe((1, 0, streams, 0, streams * (length + DECODED // 2), 0), measured_ns)


def fit(probes: Sequence[Probe]) -> CostModel:
    """Raises CalibrationError where the probes don't tell the coefficients apart."""
    count = len(probes[0].weights)
    kept = list(range(count))
    while True:  # what comes out below 0 is taken as 0, and the rest is fitted anew
        solved = _least_squares(probes, kept)
        worst = min(range(len(kept)), key=lambda index: solved[index])
        if solved[worst] >= 0:
            break
        del kept[worst]
    values = [0.0] * count
    for index, value in zip(kept, solved, strict=True):
        values[index] = value
    base, prefill, decode, prefill_context, decode_context, request = values
    if base < 1:
        raise CalibrationError("the probes say that a step without work costs nothing: measure on a quiet machine")
    return CostModel(base, prefill, decode, prefill_context, decode_context, request_ns=int(request))


def _least_squares(probes: Sequence[Probe], kept: Sequence[int]) -> list[float]:
    """Normal equations over rows divided by what was measured, by elimination with pivoting."""
    rows = [[probe.weights[index] / probe.measured_ns for index in kept] for probe in probes]
    scale = [max(abs(row[column]) for row in rows) or 1.0 for column in range(len(kept))]
    rows = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    size = len(kept)
    system = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(system[index][column]))
        if abs(system[pivot][column]) < 1e-9:
            raise CalibrationError("the probes don't tell the costs apart: too few lengths fit the model's context")
        system[column], system[pivot] = system[pivot], system[column]
        for other in range(size):
            if other != column:
                factor = system[other][column] / system[column][column]
                system[other] = [a - factor * b for a, b in zip(system[other], system[column], strict=True)]
    return [system[index][size] / system[index][index] / scale[index] for index in range(size)]


def _prompt(source: random.Random, described: tercet.ServerDescription, length: int) -> list[int]:
    """Random ids, so that nothing of it is cached."""
    return [source.randrange(min(_FIRST_ID, described.vocab_size - 1), described.vocab_size) for _ in range(length)]


async def _first_token(client: tercet.AsyncClient, prompt: Sequence[int]) -> float:
    began = time.monotonic_ns()
    sampling = tercet.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    async with client.generate(prompt, sampling=sampling) as stream:
        async for _ in stream:
            break
    return float(time.monotonic_ns() - began)


async def _between_tokens(client: tercet.AsyncClient, prompts: Sequence[Sequence[int]]) -> float:
    """Mean of the gaps in which all of them decode, ns."""
    arrivals = await asyncio.gather(*(_arrivals(client, prompt) for prompt in prompts))
    began, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    gaps = [
        float(after - before)
        for times in arrivals
        for before, after in itertools.pairwise(times)
        if began <= before and after <= ended
    ]
    if not gaps:
        raise CalibrationError(f"{len(prompts)} streams never decoded together: has the executor so few slots?")
    return statistics.mean(gaps)


async def _arrivals(client: tercet.AsyncClient, prompt: Sequence[int]) -> list[int]:
    """When each token came; those of one delta came at once."""
    times: list[int] = []
    sampling = tercet.SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    async with client.generate(prompt, sampling=sampling) as stream:
        async for delta in stream:
            times += [time.monotonic_ns()] * len(delta.token_ids)
    return times
