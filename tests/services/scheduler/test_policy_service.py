"""Policies, quotas and the ladder over a real socket: what callers are told and what is counted."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from chain import Chain, chain
from prometheus_client import CollectorRegistry

from services.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ServiceError
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.limits import LadderConfig, TenantQuota
from services.scheduler.core.policies.policy import POLICIES
from tercet.v1 import common_pb2, scheduler_pb2


def request(
    max_tokens: int = 4, length: int = 6, tenant: str = "a", priority: int = 0, **limits: int
) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(tenant=tenant, priority=priority),
        prompt_ids=range(1, length + 1),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        limits=common_pb2.TimeLimits(**limits),
    )


async def events(running: Chain, message: scheduler_pb2.SchedulerServiceGenerateRequest) -> list[Any]:
    return [event async for event in running.stub.Generate(message)]


async def refusal(running: Chain, message: scheduler_pb2.SchedulerServiceGenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(running, message)
    return from_rpc_error(caught.value)


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"tercet_{name}", labels) or 0.0


async def test_the_policy_is_told_and_changed_at_run_time() -> None:
    async with chain() as (running, _):
        described = await running.stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest())
        assert list(described.policies) == list(POLICIES)
        changed = await running.stub.SetPolicy(scheduler_pb2.SchedulerServiceSetPolicyRequest(policy="fair"))
        assert changed.previous == "fcfs"
        described = await running.stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest())
        assert described.policies[0] == "fair"
        assert sorted(described.policies) == sorted(POLICIES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.SetPolicy(scheduler_pb2.SchedulerServiceSetPolicyRequest(policy="best"))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "policy"
        assert len(await events(running, request())) >= 3
        await running.drained()


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves(policy: str) -> None:
    async with chain(core=CoreConfig(policy=policy, prefill_chunk=8)) as (running, _):
        answers = await asyncio.gather(
            *(events(running, request(5, 4 + number, "abc"[number % 3], number % 4)) for number in range(24))
        )
        assert all(answer[-1].finished.usage.delivered_tokens == 5 for answer in answers)
        await running.drained()


async def test_a_quota_refuses_with_its_reason_and_a_time_to_wait() -> None:
    config = CoreConfig(quotas={"a": TenantQuota(tokens_per_minute=12)})
    async with chain(core=config) as (running, _):
        await events(running, request())
        error = await refusal(running, request())
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, error.field) == ("QUOTA_EXCEEDED", "tokens_per_minute")
        assert error.retry_after_s is not None
        assert 30 < error.retry_after_s <= 40  # 8 of 12 tokens a minute are wanting
        await events(running, request(tenant="b"))
        assert counted(running.registry, "admission_rejections_total", reason="quota") == 1
        await running.drained()


async def test_what_cannot_make_its_limit_is_refused_once_steps_were_measured() -> None:
    async with chain(core=CoreConfig(policy="deadline")) as (running, _):
        await events(running, request())  # nothing is known before the first step
        running.engine._cost.observe(10, 10_000_000_000)
        error = await refusal(running, request(first_token_ns=1_000_000_000))
        assert isinstance(error, DeadlineExceeded)
        assert error.metadata["limit_kind"] == "first_token"
        await running.drained()


async def test_the_ladder_is_told_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    never = 10**18
    ladder = LadderConfig(enabled=True, enter_ns=never, leave_at=0.0, leave_ns=never, max_tokens=2)
    async with chain(core=CoreConfig(ladder=ladder)) as (running, _):
        running.core._gate.ladder._level = 3  # how rungs are taken is tested with the core
        low = await events(running, request(9, priority=-1))
        assert list(low[0].accepted.degraded) == [
            scheduler_pb2.DEGRADE_RUNG_PREFILL_SHARE,
            scheduler_pb2.DEGRADE_RUNG_MAX_TOKENS,
        ]
        assert low[0].accepted.max_tokens == low[-1].finished.usage.delivered_tokens == 2
        assert counted(running.registry, "requests_degraded_total", rung="max_tokens") == 1
        running.core._gate.ladder._level = 4
        error = await refusal(running, request(priority=-1))
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "DEGRADED"
        assert error.retry_after_s is not None
        assert counted(running.registry, "admission_rejections_total", reason="degraded") == 1
        with caplog.at_level(logging.WARNING):
            running.engine.tick()
        assert "degrade ladder: 4 rungs in force (prefill_share, single_answer, max_tokens, admission)" in caplog.text
        assert counted(running.registry, "degrade_rungs") == 4
        assert len(await events(running, request(9))) >= 3  # other classes lose nothing
        await running.drained()
