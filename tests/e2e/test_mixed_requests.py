"""A thousand requests of every kind, over every door at once: each ends in exactly one way, and nothing is left.

Kinds are drawn by a seed: whole answers and streams, readers who leave at any moment, deadlines, aborts, bodies that
are no JSON or ask for what can't be. What a kind may end as is in its row; whatever the client saw, the edge, the
gateway and the scheduler must have told the same number of ends.
"""

import asyncio
import collections
import json
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest
from chain import TextChain
from fake_stack import until
from prometheus_client import CollectorRegistry
from smg_grpc_proto.generated import vllm_engine_pb2
from smg_support import MODEL, vllm_chain

from services.rpc import make_channel
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

REQUESTS: Final = 1000
AT_ONCE: Final = 32
SEED: Final = 20260501
ANSWER: Final = "and so on and on, " * 8
GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
LEFT: Final = "left"


@dataclass
class Doors:
    """One draw of everything that a request needs. name: its id."""

    http: httpx.AsyncClient
    tokenizer: Any
    vllm: Any
    draw: random.Random
    name: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.name}

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": f"Number {self.name}", "max_tokens": self.draw.randint(1, 24), **more}


Kind = Callable[[Doors], Awaitable[str]]


async def whole(doors: Doors) -> str:
    answer = await doors.http.post("/v1/completions", json=doors.body(), headers=doors.headers)
    return f"{answer.status_code} {answer.json()['choices'][0]['finish_reason']}"


async def chat(doors: Doors) -> str:
    body = doors.body(messages=[{"role": "user", "content": "hi"}], stop=["never to be seen"])
    del body["prompt"]
    answer = await doors.http.post("/v1/chat/completions", json=body, headers=doors.headers)
    return f"{answer.status_code} {answer.json()['choices'][0]['finish_reason']}"


async def streamed(doors: Doors) -> str:
    return await _stream(doors, leave_after=None)


async def left_in_the_stream(doors: Doors) -> str:
    return await _stream(doors, leave_after=doors.draw.randint(0, 6))


async def _stream(doors: Doors, leave_after: int | None) -> str:
    body, seen, end = doors.body(stream=True), 0, "none"
    async with doors.http.stream("POST", "/v1/completions", json=body, headers=doors.headers) as answer:
        async for line in answer.aiter_lines():
            if seen == leave_after:
                return LEFT
            if line.startswith("data: {"):
                seen += 1
                event = json.loads(line.removeprefix("data: "))
                end = event["choices"][0]["finish_reason"] or end if event.get("choices") else end
        return f"{answer.status_code} {end}"


async def left_while_waiting(doors: Doors) -> str:
    asking = asyncio.ensure_future(doors.http.post("/v1/completions", json=doors.body(), headers=doors.headers))
    await asyncio.wait({asking}, timeout=doors.draw.random() * 0.05)
    if asking.done():
        return f"{asking.result().status_code} {asking.result().json()['choices'][0]['finish_reason']}"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return LEFT


async def broken_json(doors: Doors) -> str:
    raw = json.dumps(doors.body()).encode()
    cut = raw[: doors.draw.randint(1, len(raw) - 1)]
    content = doors.draw.choice([cut, cut + b"\xff", b"[" * 3000, b"null", b'{"model": 1, "model": 2}'])
    answer = await doors.http.post("/v1/completions", content=content, headers=doors.headers)
    return str(answer.status_code)


async def wrong_values(doors: Doors) -> str:
    wrong = doors.draw.choice(
        [
            {"temperature": -1},
            {"max_tokens": 0},
            {"max_tokens": "many"},
            {"prompt": 7},
            {"prompt": "word " * 2000},
            {"stop": ["x"] * 33},
            {"logit_bias": {"99999999": 1}},
            {"best_of": 3},
            {"no_such_field": True},
        ]
    )
    answer = await doors.http.post("/v1/completions", json=doors.body(**wrong), headers=doors.headers)
    return str(answer.status_code)


async def other_model(doors: Doors) -> str:
    answer = await doors.http.post("/v1/completions", json=doors.body(model="another"), headers=doors.headers)
    return str(answer.status_code)


async def half_a_request(doors: Doors) -> str:
    """The connection ends before the body does."""
    url = doors.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: {doors.name}\r\nContent-Length: 500\r\n\r\n"
    writer.write(head.encode() + b'{"model": ')
    await writer.drain()
    await asyncio.sleep(doors.draw.random() * 0.01)
    writer.close()
    return LEFT


def _asked(doors: Doors, **more: Any) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
    return tokenizer_pb2.TokenizerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id=doors.name),
        text="hello",
        sampling=common_pb2.SamplingParams(max_tokens=doors.draw.randint(1, 24), **more),
    )


async def over_grpc(doors: Doors) -> str:
    return await _read(doors.tokenizer.Generate(_asked(doors)))


async def over_grpc_with_little_time(doors: Doors) -> str:
    return await _read(doors.tokenizer.Generate(_asked(doors), timeout=0.002 + doors.draw.random() * 0.1))


async def over_grpc_and_cancelled(doors: Doors) -> str:
    return await _read(doors.tokenizer.Generate(_asked(doors)), leave_after=doors.draw.randint(0, 5))


async def over_grpc_and_wrong(doors: Doors) -> str:
    return await _read(doors.tokenizer.Generate(_asked(doors, temperature=-1)))


def _vllm(doors: Doors, **more: Any) -> Any:
    return vllm_engine_pb2.GenerateRequest(
        request_id=doors.name,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=doors.draw.randint(1, 24), **more),
        stream=doors.draw.random() < 0.5,
    )


async def over_vllm(doors: Doors) -> str:
    return await _read(doors.vllm.Generate(_vllm(doors)))


async def over_vllm_and_aborted(doors: Doors) -> str:
    reading = asyncio.ensure_future(_read(doors.vllm.Generate(_vllm(doors))))
    await asyncio.sleep(doors.draw.random() * 0.05)
    await doors.vllm.Abort(vllm_engine_pb2.AbortRequest(request_ids=[doors.name]))
    return await reading


async def over_vllm_and_wrong(doors: Doors) -> str:
    return await _read(doors.vllm.Generate(_vllm(doors, logprobs=-1)))


async def _read(call: Any, leave_after: int | None = None) -> str:
    """The status; LEFT where the call was cancelled here."""
    seen = 0
    try:
        async for _ in call:
            if seen == leave_after:
                call.cancel()
                return LEFT
            seen += 1
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


ENDS: Final = {"200 length", "200 stop"}
# Kind: its weight, and what it may end as.
KINDS: Final[dict[Kind, tuple[int, set[str]]]] = {
    whole: (4, ENDS),
    chat: (3, ENDS),
    streamed: (4, ENDS),
    left_in_the_stream: (4, {LEFT, *ENDS}),
    left_while_waiting: (4, {LEFT, *ENDS}),
    broken_json: (3, {"400"}),
    wrong_values: (3, {"400"}),
    other_model: (1, {"404"}),
    half_a_request: (1, {LEFT}),
    over_grpc: (3, {"OK"}),
    over_grpc_with_little_time: (3, {"OK", "DEADLINE_EXCEEDED"}),
    over_grpc_and_cancelled: (3, {LEFT, "OK"}),
    over_grpc_and_wrong: (1, {"INVALID_ARGUMENT"}),
    over_vllm: (2, {"OK"}),
    over_vllm_and_aborted: (3, {"OK", "CANCELLED"}),
    over_vllm_and_wrong: (1, {"UNIMPLEMENTED"}),
}


class Lines(logging.Handler):
    """Request ids of the lines that are written at requests' ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "request":
            self.ids.append(str(vars(record)["request_id"]))


def total(registry: CollectorRegistry, name: str, **labels: str) -> float:
    samples = [one for family in registry.collect() for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


@pytest.mark.model
@pytest.mark.timeout(180)
async def test_a_thousand_mixed_requests_end_once_each(default_model_path: Path) -> None:
    lines, log = Lines(), logging.getLogger("services.requests")
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        async with vllm_chain(default_model_path, ANSWER, total_blocks=2048) as (chain, vllm, _):
            chain.runner.faults = replace(chain.runner.faults, delay_s=0.001)
            async with (
                make_channel(chain.target) as channel,
                httpx.AsyncClient(base_url=chain.http, timeout=60) as http,
            ):
                doors = Doors(http, tokenizer_pb2_grpc.TokenizerServiceStub(channel), vllm, random.Random(SEED))
                seen = await run_all(doors)
            await _all_told(chain, seen, lines)
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


async def run_all(doors: Doors) -> list[tuple[Kind, str]]:
    """REQUESTS, AT_ONCE at a time, in the seed's order."""
    kinds = doors.draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=REQUESTS)
    ahead = collections.deque(
        (kind, replace(doors, name=f"m{number}", draw=random.Random(SEED + number)))
        for number, kind in enumerate(kinds)
    )
    seen: list[tuple[Kind, str]] = []

    async def work() -> None:
        while ahead:
            kind, own = ahead.popleft()
            seen.append((kind, await kind(own)))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return seen


async def _all_told(chain: TextChain, seen: list[tuple[Kind, str]], lines: Lines) -> None:
    unexpected = collections.Counter((kind.__name__, end) for kind, end in seen if end not in KINDS[kind][1])
    assert not unexpected
    assert len(seen) == REQUESTS
    assert {kind for kind, _ in seen} == set(KINDS)

    edge, scheduler = chain.registry, chain.scheduler.registry
    for registry in (edge, scheduler):
        await until(
            lambda registry=registry: (  # type: ignore[misc]
                total(registry, "tercet_requests_received_total") == total(registry, "tercet_requests_total")
                and total(registry, "tercet_requests_running") == 0
            ),
            "the last ends",
        )
    arrived = total(edge, "tercet_requests_received_total")
    assert arrived > REQUESTS / 2
    assert total(edge, "tercet_requests_total", outcome="cancelled") > 50
    for registry in (edge, scheduler):
        for outcome in ("failed", "unavailable", "slow_reader"):
            assert total(registry, "tercet_requests_total", outcome=outcome) == 0, outcome
    sampled, delivered, discarded = (
        total(scheduler, f"tercet_{name}_tokens_total") for name in ("sampled", "delivered", "discarded")
    )
    assert sampled == delivered + discarded

    http = sum(kind in HTTP for kind, _ in seen)
    gone = sum(kind in HTTP and end == LEFT for kind, end in seen)  # some of them before their request was sent
    await until(lambda: http - gone <= total(edge, "tercet_http_requests_total") <= http, "the last exchange")
    assert total(edge, "tercet_http_requests_total", status="5xx") == 0
    assert total(edge, "tercet_http_open_streams") == 0

    # One line at each of the two services that the request came to.
    assert len(lines.ids) == arrived + total(scheduler, "tercet_requests_received_total")
    assert max(collections.Counter(lines.ids).values()) <= 2
    assert set(lines.ids) <= {f"m{number}" for number in range(REQUESTS)}


HTTP: Final = {
    *(whole, chat, streamed, left_in_the_stream, left_while_waiting),
    *(broken_json, wrong_values, other_model, half_a_request),
}
