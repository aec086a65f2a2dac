"""Whole runs: skipping gives what stepping gives, every request ends once, a seed gives the same run."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits, Plan, SequenceOutcome, StepOutcome, Submission
from services.scheduler.core.policies.policy import POLICIES
from services.simulate.cost import CostModel
from services.simulate.fleet import Fleet, FleetError, Told
from services.simulate.load import Arrivals, Request, generate, parse_lengths, parse_tenants
from services.simulate.records import NEVER, Outcome, Run
from services.simulate.simulation import Simulation
from services.simulate.skipping import SkippingCore

COST = CostModel(1e6, 2e4, 5e4, 10.0, 100.0, free_tokens=4, request_ns=1000)
BLOCK = 4


def fleet(
    policy: str = "fcfs",
    *,
    blocks: int = 64,
    slots: int = 4,
    executors: int = 1,
    depth: int = 2,
    limits: Limits | None = None,
    told: Told | int = Told.EXACT,
    **core: int,
) -> Fleet:
    return Fleet(
        CoreConfig(
            policy=policy,
            steps_in_flight=depth,
            prefill_chunk=16,
            aging_ns=20_000_000,
            default_output_estimate=8,
            **core,
        ),  # type: ignore[arg-type]
        LaneSpec(BLOCK, blocks, 32, slots, 200),
        executors,
        COST,
        limits=Limits() if limits is None else limits,
        told=told,
    )


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Up to 14 of them, with shared prefixes, gaps from none to long, three tenants, two priorities."""
    made, at = [], 0
    for _ in range(draw(st.integers(1, 14))):
        at += draw(st.sampled_from([0, 1, 700_000, 3_000_000, 40_000_000]))
        prompt = draw(st.integers(1, 40))
        family = draw(st.integers(0, 2))
        ids = tuple(family * 100 + index for index in range(-(-prompt // BLOCK))) if family else ()
        output, tenant = draw(st.integers(1, 60)), draw(st.sampled_from("abc"))
        made.append(Request(at, prompt, output, ids, tenant, draw(st.integers(0, 1))))
    return made


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=requests(),
    policy=st.sampled_from(list(POLICIES)),
    blocks=st.sampled_from([26, 32, 64, 400]),
    slots=st.integers(1, 6),
    executors=st.sampled_from([1, 2, 3, 11]),
    depth=st.integers(1, 2),
    told=st.sampled_from([Told.EXACT, Told.NONE, 50]),
    total_ms=st.sampled_from([None, 30, 80]),
    between_ms=st.sampled_from([None, 3, 20]),
    clients=st.sampled_from([None, None, 3]),
)
def test_skipping_gives_exactly_what_stepping_gives(
    load: list[Request],
    policy: str,
    blocks: int,
    slots: int,
    executors: int,
    depth: int,
    told: Told | int,
    total_ms: int | None,
    between_ms: int | None,
    clients: int | None,
) -> None:
    limits = Limits(
        total_ns=None if total_ms is None else total_ms * 1_000_000,
        between_tokens_ns=None if between_ms is None else between_ms * 1_000_000,
    )
    made = fleet(policy, blocks=blocks, slots=slots, executors=executors, depth=depth, limits=limits, told=told)
    skipped = Simulation(made, clients=clients, by_tenant=True).run(load)
    assert skipped == Simulation(made, skipping=False, clients=clients, by_tenant=True).run(load)
    every_request_ended_once(skipped, load)


def every_request_ended_once(run: Run, load: list[Request]) -> None:
    records = run.records
    assert len(records) == len(load)
    for number in range(len(load)):
        outcome = Outcome(records.outcome[number])
        assert outcome is not Outcome.LIVE
        assert records.ended[number] >= records.submitted[number]
        if outcome is Outcome.SERVED:
            assert records.submitted[number] < records.first[number] <= records.last[number] == records.ended[number]
            assert records.delivered[number] >= 1
        if outcome in (Outcome.REFUSED, Outcome.UNFIT, Outcome.EXPIRED):
            assert records.first[number] == NEVER


@pytest.mark.parametrize("executors", [1, 3, 12])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_skipping_gives_what_stepping_gives_on_a_busy_fleet(policy: str, executors: int) -> None:
    """More requests than hypothesis would make: lanes that wait for each other, blocks that run short."""
    load = list(
        generate(
            70,
            Arrivals(110 * executors, burst=3),
            parse_lengths("uniform:1:40", "p"),
            parse_lengths("lognormal:16:1:100", "o"),
            executors,
            parse_tenants("a=5,b=1,c=1@1"),
        )
    )
    limits = Limits(total_ns=400_000_000, between_tokens_ns=30_000_000)
    for told in (Told.EXACT, Told.NONE):
        made = fleet(policy, blocks=50, slots=5, executors=executors, limits=limits, told=told)
        skipped = Simulation(made, by_tenant=True).run(load)
        assert skipped == Simulation(made, skipping=False, by_tenant=True).run(load)


def test_a_skip_leaves_the_core_as_so_many_calls_do() -> None:
    stepped, skipped = (SkippingCore(fleet(slots=3).core, lambda lane: None) for _ in range(2))
    plans: list[Plan] = []
    now = 0

    def step(core: SkippingCore, at: int) -> Plan:
        plan = core.plan("lane", at)
        assert plan is not None
        return plan

    def outcome(plan: Plan) -> StepOutcome:
        drawn = tuple(SequenceOutcome(piece.slot, 1) for piece in plan.slices if piece.samples)
        return StepOutcome(plan.step_id, drawn)

    for core in (stepped, skipped):
        now, plans = 0, []
        core.attach("lane", LaneSpec(BLOCK, 64, 32, 3, 200), now)
        for number, tenant in enumerate("aab"):
            core.submit(Submission(str(number), tenant, 5 + number, 50, Limits(total_ns=10**9)), now)
        plans = [step(core, now), step(core, now)]
        for _ in range(4):
            now += 1000
            core.apply("lane", outcome(plans.pop(0)), now)
            plans.append(step(core, now))
    quiet = skipped.quiet_steps("lane")
    assert quiet is not None
    assert quiet.before_ns == 10**9
    times = [now + 700 * (index + 1) for index in range(11)]
    assert len(times) <= quiet.steps
    for at in times:
        stepped.apply("lane", outcome(plans.pop(0)), at)
        plans.append(step(stepped, at))
    skipped.glance("lane", times[:4], 0)
    skipped.glance("lane", times[:7], 4)
    assert skipped.skip("lane", times, 7) == ["0", "1", "2"]
    assert inside(skipped) == inside(stepped)
    skipped.check()


def inside(core: SkippingCore) -> list[object]:
    """All of it but for the numbers of blocks."""
    lane, placements = core._lanes["lane"], []
    for sequence in lane.running:
        placement = sequence.placed()
        placements.append((placement.computed, placement.confirmed, placement.pending, placement.last_step))
        placements.append((len(placement.blocks), placement.published, sequence.delivered, sequence.known))
        placements.append((sequence.last_token_at, sequence.prefill_chunks))
    steps = [(step.step_id, step.tokens, [end for _, end in step.ends]) for step in lane.in_flight]
    pace = core._binding._paces["lane"]
    return [
        placements,
        steps,
        (lane.planned, lane.applied, lane.pool.free),
        core.totals(),
        core.load(),
        core.next_deadline(),
        [core._gate.counters.served(tenant) for tenant in "ab"],
        (list(pace.in_flight), pace.freed_at, pace.fit.estimate()),
    ]


def test_steps_are_really_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = 0
    plan = SkippingCore.plan

    def counted(self: SkippingCore, lane: str, now: int) -> object:
        nonlocal plans
        plans += 1
        return plan(self, lane, now)

    monkeypatch.setattr(SkippingCore, "plan", counted)
    run = Simulation(fleet()).run([Request(0, 10, 100)])
    assert run.steps == 100
    assert plans < 20


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_core_is_sound_after_skips(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip, skips = SkippingCore.skip, []

    def checked(self: SkippingCore, lane: str, times: list[int], seen: int) -> list[str]:
        keys = skip(self, lane, times, seen)
        self.check()
        skips.append(len(times))
        return keys

    monkeypatch.setattr(SkippingCore, "skip", checked)
    load = [Request(index * 30_000_000, 9 + index, 20 + 3 * index, (1, 2), "ab"[index % 2]) for index in range(8)]
    run = Simulation(fleet(policy, executors=2)).run(load)
    assert skips
    assert run.records.outcome == bytearray([Outcome.SERVED]) * 8


def test_outputs_have_the_lengths_of_the_load() -> None:
    load = [Request(0, 5, length) for length in (1, 2, 3, 17, 40)]
    for told in (Told.EXACT, Told.NONE, 64):
        run = Simulation(fleet(told=told, blocks=400)).run(load)
        assert list(run.records.delivered) == [1, 2, 3, 17, 40]


def test_the_clock_is_the_cost_model() -> None:
    """One request alone: its prompt is one step, each further token another one."""
    run = Simulation(fleet(depth=1)).run([Request(5, 10, 3)])
    prefill = int(1e6 + 2e4 * (10 - 4) + 10.0 * 55)
    second, third = int(1e6 + 100.0 * 11), int(1e6 + 100.0 * 12)  # its one row hides behind the free tokens
    assert run.records.first[0] == 5 + prefill
    assert run.records.ended[0] == 5 + prefill + second + third
    assert run.busy_ns == (prefill + second + third,)


def test_padded_rows_cost_until_the_batch_ends() -> None:
    load = [Request(0, 4, 1), Request(0, 4, 40), *[Request(0, 4, 2) for _ in range(3)]]  # the first keeps them together
    dear = dataclasses.replace(COST, free_tokens=0)
    compact, padded = (
        Simulation(dataclasses.replace(fleet(policy, blocks=400), cost=dear)).run(load).end_ns
        for policy in ("static-compact", "static-padded")
    )
    assert padded - compact == pytest.approx(3 * 38 * 5e4, rel=0.05)


def test_shared_prefixes_are_found() -> None:
    load = [Request(0, 41, 2, tuple(range(11))), Request(50_000_000, 41, 2, tuple(range(11)))]
    run = Simulation(fleet()).run(load)
    assert list(run.records.cached) == [0, 40]


def test_more_executors_take_turns() -> None:
    load = [Request(0, 10, 30) for _ in range(8)]
    one, two = (Simulation(fleet(executors=count, blocks=400)).run(load) for count in (1, 2))
    assert two.end_ns < one.end_ns
    assert all(two.busy_ns)


def test_a_slow_executor_takes_longer() -> None:
    made = dataclasses.replace(fleet(), slowness=(3.0,))
    assert Simulation(made).run([Request(0, 10, 30)]).end_ns == pytest.approx(
        3 * Simulation(fleet()).run([Request(0, 10, 30)]).end_ns, rel=1e-3
    )
    with pytest.raises(FleetError, match="slowness names 2 executors; there are 1"):
        dataclasses.replace(fleet(), slowness=(1.0, 1.0))


def test_a_full_queue_refuses() -> None:
    run = Simulation(fleet(max_queued_requests=2, slots=1)).run([Request(0, 10, 30) for _ in range(9)])
    assert run.records.outcome.count(Outcome.REFUSED) == 6
    assert run.records.outcome.count(Outcome.SERVED) == 3


def test_what_fits_nowhere_is_unfit() -> None:
    run = Simulation(fleet(blocks=8)).run([Request(0, 40, 30), Request(0, 4, 4)])
    assert [Outcome(value) for value in run.records.outcome] == [Outcome.UNFIT, Outcome.SERVED]


def test_a_closed_loop_never_has_more_than_its_clients() -> None:
    run = Simulation(fleet(blocks=400), clients=3).run([Request(0, 10, 10) for _ in range(20)])
    live = [
        sum(1 for n in range(20) if run.records.submitted[n] <= at < run.records.ended[n])
        for at in run.records.submitted
    ]
    assert max(live) == 3
    assert run.records.outcome.count(Outcome.SERVED) == 20


def test_a_seed_gives_the_same_run_and_another_gives_another() -> None:
    def run(seed: int) -> Run:
        load = generate(
            60,
            Arrivals(100, burst=3),
            parse_lengths("lognormal:20:0.8:100", "p"),
            parse_lengths("uniform:1:40", "o"),
            seed,
            parse_tenants("a=10,b=1@5"),
        )
        return Simulation(fleet("priority", executors=2)).run(load)

    assert run(7) == run(7)
    assert run(7) != run(8)
