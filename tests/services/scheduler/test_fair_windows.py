"""Two tenants with work always waiting, one of which asks for far more: what each is served in every window of 30 s.

On a virtual clock, for loads that break simpler rules: each such rule is tried too, and fails.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from fair_load import Lengths, Served, Tenant, serve

from services.scheduler.core.calls import LaneSpec

SPEC = LaneSpec(block_size=16, total_blocks=2000, max_batched_tokens=512, max_sequences=16, max_model_len=8192)
TIGHT = replace(SPEC, total_blocks=150)
SECONDS = 48
Load = tuple[Tenant, Tenant]


def about(prompt: int, answer: int) -> Lengths:
    def draw(chance: Random) -> tuple[int, int]:
        return tuple(chance.randint(length * 3 // 4, length * 5 // 4) for length in (prompt, answer))  # type: ignore[return-value]

    return draw


CHAT: Load = (Tenant(about(100, 100), rate=14), Tenant(about(100, 100), rate=140))
LONG_ANSWERS_FIRST: Load = (Tenant(about(100, 20), rate=70, begins_s=12), Tenant(about(100, 800), rate=20))
BOTH_LONG: Load = (Tenant(about(100, 800), rate=6, begins_s=12), Tenant(about(100, 800), rate=60))
LONG_PROMPTS: Load = (Tenant(about(100, 100), rate=20), Tenant(about(3000, 20), rate=20))
TAKE_TURNS: Load = (Tenant(about(1200, 60), rate=10), Tenant(about(1200, 60), rate=100))
SHARED: Load = (Tenant(about(600, 50), rate=40, shared=512), Tenant(about(600, 50), rate=140))


def run(load: Load, weights: tuple[float, float], **rest: object) -> Served:
    small, big = (replace(tenant, weight=weight) for tenant, weight in zip(load, weights, strict=True))
    served = serve({"small": small, "big": big}, seconds=SECONDS, **{"spec": SPEC, **rest})  # type: ignore[arg-type]
    assert any(served.windows()), "there is no window to judge"
    return served


@pytest.mark.parametrize(
    ("load", "weights", "rest"),
    [
        (CHAT, (1, 1), {}),
        (CHAT, (1, 3), {}),
        (CHAT, (3, 1), {}),
        (LONG_ANSWERS_FIRST, (1, 1), {}),
        (BOTH_LONG, (1, 1), {}),
        (BOTH_LONG, (1, 3), {}),
        (LONG_PROMPTS, (1, 1), {}),
        (TAKE_TURNS, (1, 1), {}),
        (SHARED, (1, 1), {}),
        (CHAT, (1, 1), {"spec": TIGHT}),
        ((replace(CHAT[0], asked=2000, rate=25), replace(CHAT[1], asked=150)), (1, 1), {}),
        ((replace(CHAT[0], rate=30), replace(CHAT[1], rate=300)), (1, 1), {"lanes": 2}),
    ],
    ids=[
        *(
            "chat-1:1",
            "chat-1:3",
            "chat-3:1",
            "long-answers-first",
            "both-long",
            "both-long-1:3",
            "long-prompts",
            "take-turns",
        ),
        *("shared-prefix", "tight-pool", "asks-for-more-than-it-needs", "two-lanes"),
    ],
)
def test_weighted_service_is_within_a_tenth_in_every_window(
    load: Load, weights: tuple[float, float], rest: dict[str, object]
) -> None:
    assert run(load, weights, **rest).worst() <= 0.1


def test_the_price_of_it_in_preemptions_is_small() -> None:
    served = run(CHAT, (1, 1))
    assert served.preemptions <= served.admissions / 50


def test_the_price_of_it_in_service_is_small() -> None:
    fair, first_come = run(TAKE_TURNS, (1, 1)), run(TAKE_TURNS, (1, 1), config={"policy": "fcfs"})
    assert fair.total() >= 0.95 * first_come.total()
    assert fair.preemptions <= fair.admissions / 20


def prompts_are_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a place is ahead again as soon as its prompt is computed: the two take turns."""
    monkeypatch.setattr("services.scheduler.core.claims._Title._prompt", lambda title, head, cached: 0)


def recomputing_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small differences are made up for with work that is lost to both."""
    monkeypatch.setattr("services.scheduler.core.claims._Title._lost", lambda title, victim: 0)


@pytest.mark.parametrize("naive", [prompts_are_no_price, recomputing_is_no_price])
def test_who_counts_less_than_an_exchange_costs_preempts_all_the_time(
    naive: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    naive(monkeypatch)
    served = run(TAKE_TURNS, (1, 1))
    assert served.preemptions > served.admissions / 20


def naive_aging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request betters its own class: then a flood has the oldest, and the best class to itself."""
    from services.scheduler.core.policies.policy import class_of
    from services.scheduler.core.policies.queue import WaitingQueue

    monkeypatch.setattr(
        WaitingQueue,
        "_flow",
        lambda queue, sequence: (class_of(queue._policy, sequence), sequence.submission.tenant),
    )


def no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is behind waits for places that get free: with long answers that takes most of a window."""
    monkeypatch.setattr("services.scheduler.core.claims._Title._lag", lambda title, head: 1 << 100)


def whole_cost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deposit of all that is expected: who has long answers pays long before it is served."""
    from services.scheduler.core.policies.fair import TokenCounters

    monkeypatch.setattr(
        TokenCounters,
        "price",
        lambda counters, tenant, *, prompt, output, soon: counters._weighed(tenant, prompt, output),
    )


@pytest.mark.parametrize(
    ("naive", "load"),
    [
        (naive_aging, CHAT),
        (no_claims, BOTH_LONG),
        (whole_cost_at_once, LONG_ANSWERS_FIRST),
    ],
)
def test_simpler_rules_break_it(
    naive: Callable[[pytest.MonkeyPatch], None], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive(monkeypatch)
    assert run(load, (1, 1)).worst() > 0.1


def test_first_come_first_served_breaks_it() -> None:
    assert run(CHAT, (1, 1), config={"policy": "fcfs"}).worst() > 0.5
