"""Under `shortest` a running prompt leaves its part of a step to a shorter one that waits, and never for ever."""

import dataclasses

import pytest
from scheduler_model import World, ask

from services.scheduler.core.calls import CoreConfig, LaneSpec
from services.scheduler.core.policies.policy import AGING_RUNGS, POLICIES

SPEC = LaneSpec(block_size=16, total_blocks=2000, max_batched_tokens=100, max_sequences=8, max_model_len=16_000)
AGING_NS = 1000


def world(spec: LaneSpec = SPEC) -> World:
    made = World(
        CoreConfig(
            policy="shortest",
            steps_in_flight=1,
            aging_ns=AGING_NS,
            prefill_chunk=64,
            long_prompt_tokens=500,
            long_prompt_share=0.5,
        )
    )
    made.attach("lane", spec)
    return made


def step(made: World) -> dict[str, int]:
    """Tokens of each in one step."""
    made.now += 1
    plan = made.plan("lane")
    if plan is None:
        return {}
    made.apply("lane")
    return {piece.key: piece.count for piece in plan.slices}


def steps_until_first_token(made: World, key: str) -> int:
    steps = 0
    while not made.users[key].given:
        step(made)
        steps += 1
    return steps


def end(made: World) -> None:
    for key in list(made.users):
        made.cancel(key)
    made.drain()


def behind_a_longer_one() -> int:
    made = world()
    made.submit(ask("longer", 8000, 2))
    step(made)
    made.submit(ask("long", 1200, 2))
    steps = steps_until_first_token(made, "long")
    end(made)
    return steps


def test_a_long_prompt_does_not_wait_for_a_longer_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are long, the one that runs would have the share of long prompts to itself, up to its end."""
    gives_way = behind_a_longer_one()
    monkeypatch.setitem(POLICIES, "shortest", dataclasses.replace(POLICIES["shortest"], gives_way=False))
    assert gives_way <= 40 < 100 <= behind_a_longer_one()


def test_what_the_shorter_one_leaves_goes_to_the_longer_one() -> None:
    made = world()
    made.submit(ask("longer", 8000, 2))
    step(made)
    made.submit(ask("short", 30, 2))
    given = step(made)
    assert given["short"] == 30
    assert given["longer"] == 64
    end(made)


def test_who_came_long_ago_gives_way_to_nobody() -> None:
    made = world()
    made.submit(ask("longer", 8000, 2))
    step(made)
    made.submit(ask("short0", 450, 1))
    assert step(made).get("longer", 0) < 50  # it has what the short one leaves
    made.now += AGING_RUNGS * AGING_NS
    for number in range(1, 6):
        made.submit(ask(f"short{number}", 450, 1))
        assert step(made)["longer"] >= 36
    end(made)


def test_an_endless_stream_of_shorter_ones_does_not_stop_it() -> None:
    made = world()
    made.submit(ask("longer", 2000, 1))
    number = 0
    while not made.users["longer"].given:
        made.submit(ask(f"short{number}", 100, 1))
        made.now += AGING_NS // 10
        step(made)
        number += 1
        assert number < 40 + 2 * 2000 // 36
    end(made)
