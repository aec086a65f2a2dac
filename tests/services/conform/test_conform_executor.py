"""The executor's suite: our own stream passes it, and each of its checks finds what it is for."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_stack import RunningExecutor, running_executor

from executor.step import SliceResult, Step, StepResult
from services.conform.__main__ import conform
from services.conform.executor import CHECKS
from services.conform.kit import Outcome, Result
from services.executor import lease as leases
from services.executor import service as services_
from services.executor import session as sessions
from services.executor.fake import SMALL, At, FakeRunner, Faults
from services.executor.fake_stream import StreamFaults
from services.executor.lease import Grant, Holder, Lease
from services.executor.session import Session

NAMES = [check.name for check in CHECKS]
Break = Callable[[RunningExecutor, pytest.MonkeyPatch], None]


@asynccontextmanager
async def executor(runner: FakeRunner | None = None) -> AsyncIterator[RunningExecutor]:
    async with running_executor(runner=runner) as fake:
        yield fake


def by_outcome(results: list[Result]) -> dict[Outcome, dict[str, str]]:
    found: dict[Outcome, dict[str, str]] = {outcome: {} for outcome in Outcome}
    for result in results:
        found[result.outcome][result.name] = result.detail
    return found


@pytest.mark.parametrize("mode", ["hash", "positions"])
async def test_our_own_stream_passes(mode: str) -> None:
    async with executor(FakeRunner(mode)) as fake:
        found = by_outcome(await conform("executor", fake.target, limit_s=20))
        assert found[Outcome.FAIL] == {}
        assert set(found[Outcome.NOT_APPLICABLE]) == {"row-error"}
        assert not fake.runner.violations


@pytest.mark.parametrize("change", [{"block_size": 1, "total_blocks": 200}, {"block_size": 64}, {"max_sequences": 1}])
async def test_shapes_of_other_executors(change: dict[str, int]) -> None:
    async with executor(FakeRunner(capacity=replace(SMALL, **change))) as fake:
        found = by_outcome(await conform("executor", fake.target, limit_s=20))
        assert found[Outcome.FAIL] == {}


async def test_a_row_that_fails_alone() -> None:
    async with executor(FakeRunner(faults=Faults(nan_slots=frozenset({1})))) as fake:
        found = by_outcome(await conform("executor", fake.target, only=["row-error"], limit_s=20))
        assert found[Outcome.PASS] == {"row-error": ""}


# Servers that break one rule each, and the checks that must find it.


def stream_faults(**faults: Any) -> Break:
    def apply(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
        fake.stream.faults = StreamFaults(**faults)

    return apply


def runner_faults(**faults: Any) -> Break:
    def apply(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
        fake.runner.faults = Faults(**faults)

    return apply


def patched(owner: Any, name: str, value: Any) -> Break:
    def apply(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, value)

    return apply


def described(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    fake.service.open(replace(fake.description, numerics=""))


def draws_by_the_clock(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    """Tokens that depend on how many steps there were, not on the sequence."""
    right = fake.runner.run

    def run(step: Step) -> StepResult:
        result = right(step)
        rows = tuple(SliceResult(one.slot, (fake.runner.count % 1000,), one.logprobs) for one in result.results)
        return replace(result, results=rows)

    patch.setattr(fake.runner, "run", run)


def checks_nothing(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    """Whatever it is sent, it answers with something."""

    def run(step: Step) -> StepResult:
        return StepResult(step.step_id, tuple(SliceResult(one.slot, (3,)) for one in step.slices if one.samples))

    patch.setattr(fake.runner, "run", run)
    right = sessions.step_from_proto

    def lenient(message: Any) -> Any:
        for piece in message.slices:
            if piece.HasField("new_sequence"):
                piece.new_sequence.sampling.temperature = 0
        return right(message)

    patch.setattr(sessions, "step_from_proto", lenient)


def rows_fail_together(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    fake.runner.faults = Faults(nan_slots=frozenset(range(8)))


def renumbers(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    """Takes every step as the next one of this epoch."""
    right = Session._take

    def take(self: Session, message: Any) -> None:
        if message.WhichOneof("message") == "claim":
            return
        message.step.step_id = self._last_step_id + 1
        message.step.epoch = self.holder.epoch
        right(self, message)

    patch.setattr(Session, "_take", take)


def anybody_owns(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    right = Lease.claim

    def claim(self: Lease, scheduler_id: str, *, takeover: bool, now_ns: int) -> Grant:
        return right(self, scheduler_id, takeover=True, now_ns=now_ns)

    patch.setattr(Lease, "claim", claim)


def ousts_nobody(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    right = Lease.claim

    def claim(self: Lease, scheduler_id: str, *, takeover: bool, now_ns: int) -> Grant:
        return right(self, scheduler_id, takeover=False, now_ns=now_ns)

    patch.setattr(Lease, "claim", claim)


def never_releases(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "release", lambda self, epoch: None)
    fake.service._lease._holder = Holder("gone", 0, 0) if fake.service._lease._holder is None else None


def no_logprobs(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake.runner, "_logprobs", lambda token_id, top: ())


def keeps_the_pool(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake.runner, "reset", lambda: None)


def answers_twice_what_comes_twice(fake: RunningExecutor, patch: pytest.MonkeyPatch) -> None:
    right = Session._take

    def take(self: Session, message: Any) -> None:
        self._last_step_id = min(self._last_step_id, message.step.step_id - 1)
        right(self, message)

    patch.setattr(Session, "_take", take)


BROKEN: dict[str, tuple[Break, set[str]]] = {
    "describe": (described, {"describe"}),
    "results twice": (stream_faults(duplicate_results=frozenset(range(1, 9))), {"step.order"}),
    "a stream that ends": (stream_faults(stale_epoch_at=2), {"step.order", "step.ahead"}),
    "no heartbeats": (stream_faults(drop_heartbeats=True), {"heartbeats"}),
    "one epoch for all": (stream_faults(grant_epoch=1), {"claim.granted"}),
    "a step that fails": (runner_faults(crash=At(step_id=1)), {"step.order", "lease.cancelled", "same.blocks"}),
    "rows of NaN": (rows_fail_together, {"step.order", "row-error"}),
    "draws by the clock": (
        draws_by_the_clock,
        {"step.ahead", "same.batch", "same.chunks", "same.cached", "same.blocks"},
    ),
    "checks nothing": (
        checks_nothing,
        {name for name in NAMES if name.startswith("bad.")} | {"step.follows", "step.tokens", "epoch.empty"},
    ),
    "renumbers": (renumbers, {"step.gap", "step.stale", "step.repeated", "claim.first"}),
    "answers twice": (answers_twice_what_comes_twice, {"step.repeated"}),
    "keeps the pool": (keeps_the_pool, {"epoch.empty"}),
    "any claim": (patched(services_, "_check_claim", lambda *_: None), {"claim.model", "claim.schema"}),
    "any name": (patched(leases, "REQUEST_ID_FORMAT", re.compile(r".*")), {"claim.name"}),
    "anybody owns it": (anybody_owns, {"lease.held"}),
    "ousts nobody": (ousts_nobody, {"lease.takeover"}),
    "never releases": (never_releases, {"lease.released", "lease.cancelled"}),
    "no logprobs": (no_logprobs, {"logprobs"}),
}
ELSEWHERE = {"health"}  # test_a_server_without_health


def test_every_check_is_seen_to_fail() -> None:
    assert set().union(*(names for _, names in BROKEN.values())) | ELSEWHERE == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_server_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply, expected = BROKEN[name]
    monkeypatch.setattr("services.conform.kit.ANSWER_S", 1.0)
    monkeypatch.setattr("services.conform.owner.ANSWER_S", 1.0)
    async with executor() as fake:
        apply(fake, monkeypatch)
        results = await conform("executor", fake.target, only=sorted(expected), limit_s=3)
        assert {result.name for result in results if result.outcome is Outcome.FAIL} == expected
        assert all(result.detail for result in results)
        monkeypatch.undo()


async def test_a_server_without_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_stack.add_health", lambda server, readiness: None)
    async with executor() as fake:
        (result,) = await conform("executor", fake.target, only=["health"])
    assert result.outcome is Outcome.FAIL
    assert "UNIMPLEMENTED" in result.detail


async def test_a_hanging_server_costs_the_limit() -> None:
    async with executor() as fake:
        fake.runner.faults = Faults(hang=At(step_id=1))
        (result,) = await conform("executor", fake.target, only=["step.order"], limit_s=0.3)
        assert (result.outcome, result.detail) == (Outcome.FAIL, "no end within 0.3 s")
        fake.runner.release()


async def test_checks_are_chosen_by_name() -> None:
    async with executor() as fake:
        results = await conform("executor", fake.target, only=["claim.", "describe"])
        assert {result.name for result in results} == {name for name in NAMES if name[:5] in ("claim", "descr")}
        with pytest.raises(ValueError, match="nonsense"):
            await conform("executor", fake.target, only=["nonsense"])
