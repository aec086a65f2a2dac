"""Which lane takes what waits: by predicted work, cached prefix and active requests; nobody waits for ever for it."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from scheduler_model import ask

from services.scheduler.core.binding import CHOICES, LEFT_AT_MOST
from services.scheduler.core.calls import (
    CoreConfig,
    Emission,
    Finished,
    LaneSpec,
    Plan,
    SequenceOutcome,
    StepOutcome,
    Submission,
)
from services.scheduler.core.core import SchedulerCore

SPEC = LaneSpec(block_size=4, total_blocks=512, max_batched_tokens=64, max_sequences=16, max_model_len=512)
MS = 1_000_000


@dataclass
class Fleet:
    """Lanes that take `step_ns[lane]` for each step, on a virtual clock; steps of one lane run one after the other."""

    step_ns: dict[str, int]
    spec: LaneSpec = SPEC
    config: CoreConfig = field(default_factory=CoreConfig)
    now: int = 0

    def __post_init__(self) -> None:
        self.core = SchedulerCore(self.config)
        self.flights: dict[str, deque[tuple[int, Plan]]] = {}  # when done
        self.placed: dict[str, str] = {}  # sequence -> lane of its last admission
        self.ended: dict[str, int] = {}
        for lane in self.step_ns:
            self.core.attach(lane, self.spec, 0)
            self.flights[lane] = deque()

    def plan(self, lane: str) -> Plan | None:
        plan = self.core.plan(lane, self.now)
        if plan is not None:
            flight = self.flights[lane]
            begins = max(self.now, flight[-1][0]) if flight else self.now
            flight.append((begins + self.step_ns[lane], plan))
            self.placed.update((admitted.key, lane) for admitted in plan.admitted)
        return plan

    def plan_all(self) -> None:
        for lane in self.flights:
            while self.plan(lane) is not None:
                pass

    def advance(self, until: int) -> None:
        """Runs all that is done by then."""
        self.plan_all()
        while True:
            due = (
                min((flight[0][0], lane) for lane, flight in self.flights.items() if flight)
                if any(self.flights.values())
                else None
            )
            if due is None or due[0] > until:
                break
            self.now, lane = due
            _, plan = self.flights[lane].popleft()
            outcomes = tuple(SequenceOutcome(piece.slot, 1) for piece in plan.slices if piece.samples)
            self.note(self.core.apply(lane, StepOutcome(plan.step_id, outcomes), self.now))
            self.plan_all()
        self.now = until
        self.core.check()

    def note(self, emissions: list[Emission]) -> None:
        self.ended.update((one.key, self.now) for one in emissions if isinstance(one, Finished))

    def submit(self, submission: Submission) -> None:
        self.core.submit(submission, self.now)
        self.plan_all()

    def running(self, lane: str) -> int:
        return self.core.load().lanes[lane].running


def test_equal_lanes_share_what_comes_at_once() -> None:
    fleet = Fleet({"a": 10 * MS, "b": 10 * MS, "c": 10 * MS})
    for number in range(9):
        fleet.core.submit(ask(f"s{number}", 8), 0)
    fleet.plan_all()
    fleet.advance(11 * MS)
    assert [fleet.running(lane) for lane in "abc"] == [3, 3, 3]


def test_active_requests_count_and_not_who_came_when() -> None:
    fleet = Fleet({"a": 10 * MS})
    for number in range(6):
        fleet.submit(ask(f"old{number}", 8, 100))
    fleet.advance(50 * MS)
    fleet.core.attach("b", SPEC, fleet.now)
    fleet.step_ns["b"] = 10 * MS
    fleet.flights["b"] = deque()
    for number in range(4):
        fleet.advance(fleet.now + 25 * MS)
        fleet.submit(ask(f"new{number}", 8, 100))
    fleet.advance(fleet.now + 25 * MS)
    assert {fleet.placed[f"new{number}"] for number in range(4)} == {"b"}


def test_a_slow_lane_gets_as_much_less_as_it_is_slower() -> None:
    fleet = Fleet({"slow": 40 * MS, "fast": 10 * MS})
    for number in range(60):
        fleet.submit(ask(f"s{number}", 8, 20))
        fleet.advance(fleet.now + 12 * MS)
    fleet.advance(10**12)
    counts = {lane: sum(at == lane for at in fleet.placed.values()) for lane in fleet.step_ns}
    assert len(fleet.ended) == 60
    assert counts["fast"] > 3 * counts["slow"]


def test_what_a_lane_holds_already_draws_its_like() -> None:
    keys = tuple(bytes([number]) * 32 for number in range(24))
    config = CoreConfig(prefill_chunk=64)

    def chat(key: str) -> Submission:
        return ask(key, 97, 4, block_keys=keys, key_block_size=4)

    fleet = Fleet({"a": 10 * MS, "b": 10 * MS}, config=config)
    fleet.submit(chat("first"))
    fleet.advance(500 * MS)
    other = "b" if fleet.placed["first"] == "a" else "a"
    for number in range(2):  # so that the pace of both is known, and the other one is not busier
        fleet.submit(ask(f"filler{number}", 8, 2))
    fleet.advance(1000 * MS)
    fleet.submit(chat("again"))
    fleet.advance(2000 * MS)
    assert fleet.placed["again"] == fleet.placed["first"] != other


def test_a_closed_lane_gets_nothing_new_and_ends_what_it_has() -> None:
    fleet = Fleet({"a": 10 * MS, "b": 10 * MS})
    for number in range(4):
        fleet.submit(ask(f"s{number}", 8, 10))
    leaving = fleet.running("a")
    assert leaving
    fleet.core.close("a", fleet.now)
    fleet.core.close("nobody", fleet.now)
    for number in range(4, 12):
        fleet.submit(ask(f"s{number}", 8, 10))
    fleet.advance(10**12)
    assert len(fleet.ended) == 12
    assert {fleet.placed[f"s{number}"] for number in range(4, 12)} == {"b"}


def test_while_all_lanes_are_closed_everybody_waits_for_the_next() -> None:
    fleet = Fleet({"a": 10 * MS})
    fleet.core.close("a", 0)
    fleet.submit(ask("s", 8))
    assert fleet.core.load().waiting == 1
    fleet.core.attach("b", SPEC, 0)
    assert fleet.plan is not None
    plan = fleet.core.plan("b", 0)
    assert plan is not None
    assert [one.key for one in plan.admitted] == ["s"]


def test_work_of_a_lost_lane_goes_on_at_the_others() -> None:
    fleet = Fleet({"a": 10 * MS, "b": 10 * MS, "c": 10 * MS})
    for number in range(9):
        fleet.submit(ask(f"s{number}", 8, 30))
    fleet.advance(35 * MS)
    fleet.note(fleet.core.lose("a", fleet.now))
    del fleet.flights["a"]
    fleet.advance(10**12)
    assert len(fleet.ended) == 9
    assert set(fleet.placed.values()) == {"b", "c"}


def test_nobody_is_left_more_than_a_few_times() -> None:
    """The better lane never plans: here it stands for one that is about to be found dead."""
    fleet = Fleet({"bad": 10 * MS, "good": 10 * MS})
    for number in range(3):
        fleet.submit(ask(f"busy{number}", 8, 400))
    fleet.core.lose("good", 0)
    fleet.core.attach("good", SPEC, 0)  # empty now
    plans = 0
    fleet.core.submit(ask("s", 8, 10), 0)
    while "s" not in fleet.placed:
        done, plan = fleet.flights["bad"].popleft()
        fleet.now = done
        outcomes = tuple(SequenceOutcome(piece.slot, 1) for piece in plan.slices if piece.samples)
        fleet.core.apply("bad", StepOutcome(plan.step_id, outcomes), fleet.now)
        fleet.plan("bad")
        plans += 1
        assert plans <= LEFT_AT_MOST + 3
    assert plans > 1


@pytest.mark.parametrize("lanes", [2, 3, 3 * CHOICES])
def test_everybody_ends_whatever_the_lanes_are(lanes: int) -> None:
    chance = random.Random(lanes)
    fleet = Fleet({f"lane{number}": chance.choice([1, 5, 30]) * MS for number in range(lanes)})
    for number in range(150):
        fleet.submit(
            ask(f"s{number}", chance.randint(1, 80), chance.choice([1, 4, 30]), priority=chance.choice([0, 1]))
        )
        fleet.advance(fleet.now + chance.choice([0, 0, 3, 20]) * MS)
    fleet.advance(10**13)
    assert len(fleet.ended) == 150
    assert len(set(fleet.placed.values())) > 1
