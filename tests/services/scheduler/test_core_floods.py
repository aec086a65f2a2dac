"""Floods, refusals and ends that meet: failures that users of other servers met, each by its name in the field."""

import itertools

import pytest
from fair_load import SECOND
from scheduler_model import World, ask

from services.scheduler.core.calls import CoreConfig, LaneSpec, QueueFull, Reason, Submission

SPEC = LaneSpec(block_size=16, total_blocks=256, max_batched_tokens=256, max_sequences=4, max_model_len=2048)


def world(**config: object) -> World:
    made = World(CoreConfig(**config))  # type: ignore[arg-type]
    made.attach("lane", SPEC)
    return made


def waits_of_the_small(policy: str) -> list[float]:
    """200 prompts of one tenant at once, then a short one of another every second; steps of 100 ms. Seconds from
    submission to the first token, of the short ones."""
    made = world(policy=policy, max_queued_tokens=1 << 30)
    for number in range(200):
        made.submit(Submission(f"big{number}", "big", 400, 50))
    waits: dict[str, float] = {}
    for step in range(300):
        made.now += SECOND // 10
        if step % 10 == 0:
            made.submit(Submission(f"small{step}", "small", 50, 10))
        while made.plan("lane") is not None:
            pass
        made.apply("lane")
        for name, user in made.users.items():
            if user.given and name.startswith("small"):
                waits.setdefault(name, (made.now - user.submitted_at) / SECOND)
    late = [(made.now - made.users[name].submitted_at) / SECOND for name in made.users if name.startswith("small")]
    return sorted([*waits.values(), *late[len(waits) :]])


def test_s16_a_flood_of_one_tenant_leaves_the_others_their_turns() -> None:
    fair, naive = (waits_of_the_small(policy) for policy in ("fair", "fcfs"))
    assert len(fair) == len(naive) == 30
    assert fair[28] <= 2.0, "P95 of the wait for a first token"
    assert naive[15] >= 10.0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", range(12))
def test_g16_a_cancellation_that_meets_the_end_ends_it_once(depth: int, moment: int) -> None:
    """Before and after every plan and every apply of a whole life, that of the last token among them."""
    made = world(steps_in_flight=depth)
    made.submit(ask("a", 20, 3))
    turn = itertools.count()
    for _ in range(6):
        while True:
            if next(turn) == moment:
                made.cancel("a")
            if made.plan("lane") is None:
                break
        if next(turn) == moment:
            made.cancel("a")
        if made.executors["lane"].in_flight:
            made.apply("lane")
    made.drain()
    finished = made.users["a"].finished
    assert finished is not None
    assert finished.reason in (Reason.CANCELLED, Reason.LENGTH)
    assert sum(made.core.totals().finished.values()) == 1


def test_s14_in_an_overflow_every_request_has_exactly_one_answer() -> None:
    made = world(max_queued_requests=16)
    refused = 0
    for number in range(2000):
        try:
            made.submit(Submission(f"s{number}", f"tenant{number % 7}", 30, 3))
        except QueueFull as refusal:
            refused += refusal.field == "queued_requests"
        if number % 50 == 0 and made.plan("lane") is not None:
            made.apply("lane")
    made.drain()
    ended = sum(made.core.totals().finished.values())
    assert refused > 1000
    assert ended + refused == 2000


@pytest.mark.parametrize("depth", [1, 2])
def test_c10_a_stop_found_outside_costs_no_more_than_the_steps_in_flight(depth: int) -> None:
    made = world(steps_in_flight=depth)
    made.submit(ask("a", 20, 1000))
    while made.users["a"].given < 12:
        while made.plan("lane") is not None:
            pass
        made.apply("lane")
    planned = made.core.totals().planned_tokens
    while made.plan("lane") is not None:
        pass
    made.stop("a", 12)
    assert made.plan("lane") is None
    assert made.core.totals().planned_tokens - planned <= 1
    finished = made.users["a"].finished
    assert finished is not None
    assert (finished.reason, finished.usage.delivered) == (Reason.STOP, 12)
    assert finished.usage.discarded <= depth
    made.drain()


def test_c01_five_hundred_that_leave_in_mid_stream_leave_nothing_behind() -> None:
    made = world(policy="fair")
    for number in range(500):
        made.submit(Submission(f"s{number}", "ab"[number % 2], 20, 2000))
        for _ in range(2):
            while made.plan("lane") is not None:
                pass
            made.apply("lane")
        made.cancel(f"s{number}")
    made.drain()
    assert made.core._gate.counters._held == {}
    assert made.core._lanes["lane"].tenants == {}
    assert made.core._lanes["lane"].expected == 0
