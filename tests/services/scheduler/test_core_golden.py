"""A recorded session of the core: the same calls give the same outputs, to the last field.

The recording is every call with its arguments and its answer, one JSON list a line. A change of behaviour shows as a
diff of that file, to be read before it is committed. To record again:

    python tests/services/scheduler/test_core_golden.py --record
"""

import dataclasses
import json
import random
import sys
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Any

from services.scheduler.core import calls
from services.scheduler.core.calls import (
    CoreConfig,
    LaneSpec,
    Limits,
    Plan,
    SequenceOutcome,
    StepOutcome,
    Submission,
    SubmitError,
)
from services.scheduler.core.core import SchedulerCore

GOLDEN = Path(__file__).parent / "golden" / "core_session.jsonl"
CONFIG = CoreConfig(max_queued_requests=6, prefill_chunk=6, watermark=0.0, preemption_cap=2, default_output_estimate=2)


def encode(value: object) -> Any:
    """Frozen values as JSON: {type name: {field: value}}, defaults left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
        }
        return {type(value).__name__: fields}
    if isinstance(value, tuple) and hasattr(value, "_field_defaults"):
        defaults = value._field_defaults
        named = value._asdict().items()
        return {
            type(value).__name__: {
                name: encode(part) for name, part in named if name not in defaults or part != defaults[name]
            }
        }
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if isinstance(value, SubmitError):
        return {type(value).__name__: [value.field, value.message]}
    if isinstance(value, list | tuple):
        return [encode(part) for part in value]
    return value


def decode(value: Any) -> Any:
    """Of arguments: dataclasses, tuples and plain values."""
    if isinstance(value, dict):
        [(name, fields)] = value.items()
        return getattr(calls, name)(**{key: decode(part) for key, part in fields.items()})
    if isinstance(value, list):
        return tuple(decode(part) for part in value)
    return value


def answer(core: SchedulerCore, verb: str, arguments: list[Any]) -> Any:
    try:
        return getattr(core, verb)(*arguments)
    except SubmitError as refusal:
        return refusal


class Recorder:
    def __init__(self) -> None:
        self.core = SchedulerCore(CONFIG)
        self.lines: list[str] = []

    def call(self, verb: str, *arguments: Any) -> Any:
        result = answer(self.core, verb, list(arguments))
        self.core.check()
        self.lines.append(json.dumps([verb, encode(arguments), encode(result)]))
        return result


def record() -> list[str]:
    """Two lanes, one lost and replaced, a tight pool, mixed priorities, stops, cancels and deadlines."""
    recorder, chance = Recorder(), random.Random(7)
    specs = {"lane-1": LaneSpec(2, 12, 10, 3, 24), "lane-2": LaneSpec(4, 5, 8, 2, 24)}
    flights: dict[str, deque[Plan]] = {}
    for lane, spec in specs.items():
        recorder.call("attach", lane, spec, 0)
        flights[lane] = deque()
    for now in range(1, 140):
        if now < 110 and now % 2 == 1:
            limits = Limits(queue_ns=chance.choice([None, 15]), total_ns=chance.choice([None, 25]))
            max_tokens = chance.choice([None, None, 3, 8, 30])
            submission = Submission(
                f"s{now}", "tenant", chance.randint(1, 14), max_tokens, limits, priority=chance.choice([0, 0, 1])
            )
            recorder.call("submit", submission, now)
        if now == 60:
            recorder.call("lose", "lane-1", now)
            del flights["lane-1"]
            recorder.call("attach", "lane-3", specs["lane-1"], now)
            flights["lane-3"] = deque()
        views = recorder.core.sequences()
        if views and now % 23 == 0:
            recorder.call("cancel", chance.choice(views).key, now)
        if views and now % 17 == 0:
            view = chance.choice(views)
            recorder.call("stop", view.key, max(0, view.delivered - 1), now)
        recorder.call("expire", now)
        for lane, flight in flights.items():
            while (plan := recorder.call("plan", lane, now)) is not None:
                flight.append(plan)
            if flight:
                plan = flight.popleft()
                outcomes = []
                for piece in plan.slices:
                    if piece.samples:
                        roll = chance.random()
                        outcomes.append(SequenceOutcome(piece.slot, int(roll > 0.01), roll > 0.97, roll <= 0.01))
                recorder.call("apply", lane, StepOutcome(plan.step_id, tuple(outcomes)), now)
    return recorder.lines


def test_the_recorded_calls_give_the_recorded_outputs() -> None:
    core = SchedulerCore(CONFIG)
    for number, line in enumerate(GOLDEN.read_text().splitlines(), start=1):
        verb, arguments, expected = json.loads(line)
        given = encode(answer(core, verb, [decode(argument) for argument in arguments]))
        assert given == expected, f"line {number}: {verb}"
        core.check()


def test_the_recording_is_what_recording_again_gives() -> None:
    assert record() == GOLDEN.read_text().splitlines()


def test_the_recording_reaches_what_it_is_for() -> None:
    text = GOLDEN.read_text()
    reasons = ("stop", "length", "time_limit", "deadline", "cancelled")
    for what in ("Preempted", "Displaced", "QueueFull", *(f'{{"Reason": "{reason}"}}' for reason in reasons)):
        assert what in text


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: test_core_golden.py --record")
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(record()) + "\n")
    print(f"{GOLDEN}: {len(GOLDEN.read_text().splitlines())} calls")
