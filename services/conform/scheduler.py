"""What a scheduler must do: token ids in; Accepted, deltas and one end out; refusals by name; nothing left over."""

import asyncio
import time
from typing import Final

import grpc

from services.conform.asking import SHORT, Request, Scheduler, begun, ending, generate, request, whole
from services.conform.kit import (
    ANSWER_S,
    Check,
    NotApplicable,
    check_health,
    check_status,
    fail,
    refusal,
    require,
    require_field,
    stream_refusal,
    until,
)
from services.conform.refusals import BAD, INVALID, refused_as_bad
from tercet.v1 import common_pb2, scheduler_pb2

SERVICE: Final = "tercet.v1.SchedulerService"
LATE_S: Final = 0.2
GONE_S: Final = 2.0
FIRST_TOKEN_NS: Final = 5_000_000_000


async def describe(scheduler: Scheduler) -> None:
    told = await scheduler.stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest(), timeout=ANSWER_S)
    require(told.schema_revision == common_pb2.SCHEMA_REVISION_ONE, "schema_revision is not SCHEMA_REVISION_ONE")
    require(told.HasField("model") and told.numerics, "no executor has answered it: model or numerics are missing")
    require(told.model.vocab_size >= 2 and told.model.max_model_len >= 2, "model is not filled in")
    require(told.policies, "policies is empty")


async def health(scheduler: Scheduler) -> None:
    await check_health(scheduler.channel, SERVICE)


async def accepted(scheduler: Scheduler) -> None:
    message = request(scheduler)
    message.limits.first_token_ns = FIRST_TOKEN_NS
    answer = await whole(scheduler, message)
    told = answer.accepted
    require(told.request_id == message.context.request_id, f"Accepted tells the id {told.request_id!r}")
    require(told.numerics == scheduler.numerics, "Accepted tells other numerics than Describe")
    require(told.max_tokens == SHORT, f"Accepted tells max_tokens {told.max_tokens}; {SHORT} were asked for")
    used = told.limits.first_token_ns
    require(
        0 < used <= FIRST_TOKEN_NS, f"Accepted tells a first-token limit of {used} ns; {FIRST_TOKEN_NS} was asked for"
    )


async def drawn_id_and_seed(scheduler: Scheduler) -> None:
    message = request(scheduler, temperature=1.0)
    message.context.ClearField("request_id")
    message.sampling.ClearField("seed")
    first = await whole(scheduler, message)
    require(first.accepted.request_id, "no request id was drawn")
    message.sampling.seed = first.accepted.seed
    again = await whole(scheduler, message)
    require(again.accepted.request_id != first.accepted.request_id, "the same request id was drawn twice")
    require(again.token_ids == first.token_ids, "the seed that Accepted told gives other tokens")


async def usage(scheduler: Scheduler) -> None:
    answer = await whole(scheduler, request(scheduler))
    told = answer.finished
    require(told.reason == common_pb2.FINISH_REASON_LENGTH, "an answer cut by max_tokens did not end with LENGTH")
    require(len(answer.token_ids) == SHORT, f"{len(answer.token_ids)} tokens came; {SHORT} were asked for")
    require(told.usage.prompt_tokens == len(scheduler.prompt), f"prompt_tokens is {told.usage.prompt_tokens}")
    require(told.usage.delivered_tokens == SHORT, f"delivered_tokens is {told.usage.delivered_tokens}, not {SHORT}")
    total = told.usage.delivered_tokens + told.usage.discarded_tokens
    require(told.usage.sampled_tokens == total, "sampled is not delivered + discarded")
    outside = [one for one in answer.token_ids if one >= scheduler.model.vocab_size]
    require(not outside, f"tokens outside the vocabulary: {outside}")


async def same_beside_others(scheduler: Scheduler) -> None:
    messages = [request(scheduler, 4 + number, temperature=1.0, seed=number) for number in range(6)]
    alone = [(await whole(scheduler, message)).token_ids for message in messages]
    together = await asyncio.gather(*(whole(scheduler, message) for message in messages))
    require([one.token_ids for one in together] == alone, "tokens differ between requests alone and side by side")


async def metadata_differs(scheduler: Scheduler) -> None:
    message = request(scheduler)
    rows = (("tercet-request-id", "another"),)
    what = "a request id that differs from the metadata's"
    await stream_refusal(generate(scheduler, message, metadata=rows), INVALID, what=what)


async def id_in_use(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    stream = generate(scheduler, message)
    try:
        await begun(stream)
        again = generate(scheduler, message)
        what = "a second request with a live id"
        await stream_refusal(again, grpc.StatusCode.ALREADY_EXISTS, what=what)
    finally:
        stream.cancel()


async def superseded(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    old = generate(scheduler, message)
    try:
        await begun(old)
        message.context.attempt = 2
        message.sampling.max_tokens = SHORT
        newer = asyncio.ensure_future(whole(scheduler, message))
        await ending(old, grpc.StatusCode.ABORTED, what="a request that a higher attempt supersedes")
        require(len((await newer).token_ids) == SHORT, "the higher attempt was cut short")
    finally:
        old.cancel()


async def abort(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    stream = generate(scheduler, message)
    try:
        await begun(stream)
        told = await scheduler.stub.Abort(
            scheduler_pb2.SchedulerServiceAbortRequest(context=message.context), timeout=ANSWER_S
        )
        require(told.was_live, "Abort of a live request tells was_live false")
        await ending(stream, grpc.StatusCode.CANCELLED, what="an aborted request")
        told = await scheduler.stub.Abort(
            scheduler_pb2.SchedulerServiceAbortRequest(context=message.context), timeout=ANSWER_S
        )
        require(not told.was_live, "Abort of an ended request tells was_live true")
    finally:
        stream.cancel()


async def abort_overtakes(scheduler: Scheduler) -> None:
    message = request(scheduler)
    told = await scheduler.stub.Abort(
        scheduler_pb2.SchedulerServiceAbortRequest(context=message.context), timeout=ANSWER_S
    )
    require(not told.was_live, "Abort of an unknown request tells was_live true")
    stream = generate(scheduler, message)
    await ending(stream, grpc.StatusCode.CANCELLED, what="a request that its abort has overtaken")


async def stop(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    stream = generate(scheduler, message)
    kept = len(await begun(stream, 3))
    told = await scheduler.stub.Stop(
        scheduler_pb2.SchedulerServiceStopRequest(
            context=message.context, kept_tokens=kept, reason=scheduler_pb2.STOP_REASON_STOP_STRING
        ),
        timeout=ANSWER_S,
    )
    if not told.was_live:
        raise NotApplicable("answers end before they can be stopped")
    finished = None
    async for event in stream:
        if event.HasField("finished"):
            finished = event.finished
    if finished is None:
        fail("a stopped stream ended without Finished")
    require(finished.reason == common_pb2.FINISH_REASON_STOP, "a stopped answer did not end with STOP")
    require(
        finished.usage.delivered_tokens == kept, f"delivered_tokens is {finished.usage.delivered_tokens}, not {kept}"
    )


async def stop_without_a_reason(scheduler: Scheduler) -> None:
    message = scheduler_pb2.SchedulerServiceStopRequest(context=request(scheduler).context, kept_tokens=1)
    found = await refusal(scheduler.stub.Stop(message, timeout=ANSWER_S), INVALID, what="Stop without a reason")
    require_field(found, "reason")


async def cancelled(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    stream = generate(scheduler, message)
    await begun(stream)
    stream.cancel()

    async def is_gone() -> bool:
        try:
            return message.context.request_id not in await _live(scheduler)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                raise NotApplicable("ListRequests is not for this caller") from None
            raise

    await until(is_gone, "a cancelled request is no longer listed", GONE_S)


async def _live(scheduler: Scheduler) -> set[str]:
    found: set[str] = set()
    token = ""
    while True:
        page = await scheduler.stub.ListRequests(
            scheduler_pb2.SchedulerServiceListRequestsRequest(page_size=1000, page_token=token), timeout=ANSWER_S
        )
        found.update(one.request_id for one in page.requests)
        token = page.next_page_token
        if not token:
            return found


async def total_limit(scheduler: Scheduler) -> None:
    message = request(scheduler, scheduler.long)
    message.limits.total_ns = 1_000_000
    began = time.monotonic()
    try:
        answer = await whole(scheduler, message)
    except grpc.aio.AioRpcError as error:
        found = check_status(error, grpc.StatusCode.DEADLINE_EXCEEDED, what="a request of 1 ms")
        require(found.error.reason == "TIME_LIMIT", f"its reason is {found.error.reason!r}; expected TIME_LIMIT")
        return
    if len(answer.token_ids) >= scheduler.long:
        took_s = time.monotonic() - began
        require(took_s < LATE_S, f"a limit of 1 ms passed and the answer went on to its end, {took_s:.2f} s")
        raise NotApplicable("a whole context is computed before a limit could be seen to pass")
    told = answer.finished
    require(
        told.reason == common_pb2.FINISH_REASON_TIME_LIMIT, "an answer that a limit cut did not end with TIME_LIMIT"
    )
    require(told.limit == common_pb2.TIME_LIMIT_KIND_TOTAL, "Finished does not tell which limit")


async def resume(scheduler: Scheduler) -> None:
    message = request(scheduler, temperature=1.0, seed=7)
    full = await whole(scheduler, message)
    for cut in (0, 1, SHORT - 1, SHORT):
        again = request(scheduler, temperature=1.0, seed=7)
        again.context.attempt = 2
        _resumed(scheduler, again, full.token_ids[:cut])
        rest = await whole(scheduler, again)
        require(
            rest.token_ids == full.token_ids[cut:],
            f"resumed behind {cut} tokens came {rest.token_ids}; expected {full.token_ids[cut:]}",
        )
        require(rest.finished.usage.delivered_tokens == SHORT, "usage is not the whole answer's")


async def resume_elsewhere(scheduler: Scheduler) -> None:
    message = request(scheduler, seed=7)
    message.context.attempt = 2
    _resumed(scheduler, message, scheduler.prompt[:1])
    message.resume.numerics = "others"
    found = await stream_refusal(
        generate(scheduler, message), grpc.StatusCode.ABORTED, what="to go on with other numerics"
    )
    require(
        found.error.reason == "NUMERICS_CHANGED", f"its reason is {found.error.reason!r}; expected NUMERICS_CHANGED"
    )


async def resume_without_a_seed(scheduler: Scheduler) -> None:
    message = request(scheduler)
    message.context.attempt = 2
    message.sampling.ClearField("seed")
    _resumed(scheduler, message, scheduler.prompt[:1])
    await stream_refusal(generate(scheduler, message), INVALID, what="to go on without a seed")


def _resumed(scheduler: Scheduler, message: Request, tokens: list[int]) -> None:
    message.resume.prompt_ids.extend(scheduler.prompt)
    message.resume.output_ids.extend(tokens)
    message.resume.numerics = scheduler.numerics


async def pages(scheduler: Scheduler) -> None:
    for size in (0, 1001):
        message = scheduler_pb2.SchedulerServiceListRequestsRequest(page_size=size)
        codes = (INVALID, grpc.StatusCode.PERMISSION_DENIED)
        found = await refusal(scheduler.stub.ListRequests(message, timeout=ANSWER_S), *codes, what=f"a page of {size}")
        if found.code is grpc.StatusCode.PERMISSION_DENIED:
            raise NotApplicable("ListRequests is not for this caller")


CHECKS: Final[tuple[Check[Scheduler], ...]] = (
    Check("describe", "Describe tells model, numerics and policies", describe),
    Check("health", "grpc.health.v1 tells readiness, liveness and the service by name", health),
    Check("accepted", "Accepted comes first and tells what was decided", accepted),
    Check("drawn", "an absent id and seed are drawn; the seed told gives the answer again", drawn_id_and_seed),
    Check("usage", "one Finished comes last; sampled = delivered + discarded", usage),
    Check("same", "tokens don't depend on who else asks", same_beside_others),
    *(
        Check(
            f"bad.{name}",
            f"{what} is INVALID_ARGUMENT before Accepted, naming the field",
            refused_as_bad(what, field, spoil),
        )
        for name, (what, field, spoil) in BAD.items()
    ),
    Check("metadata", "a field that differs from its metadata is INVALID_ARGUMENT", metadata_differs),
    Check("id.in-use", "a live id is ALREADY_EXISTS", id_in_use),
    Check("id.superseded", "a higher attempt supersedes: the older one ends ABORTED", superseded),
    Check("abort", "Abort ends a request CANCELLED, and may be called again", abort),
    Check("abort.early", "an Abort that overtakes its request holds", abort_overtakes),
    Check("stop", "Stop ends an answer with STOP and the usage it names", stop),
    Check("stop.reason", "Stop without a reason is INVALID_ARGUMENT", stop_without_a_reason),
    Check("cancel", "a caller who leaves leaves no request behind", cancelled),
    Check("limit", "a passed limit is DEADLINE_EXCEEDED before the first token, TIME_LIMIT behind it", total_limit),
    Check("resume", "an answer goes on exactly behind what was delivered", resume),
    Check("resume.numerics", "it does not go on under other numerics: ABORTED", resume_elsewhere),
    Check("resume.seed", "it does not go on without the seed: INVALID_ARGUMENT", resume_without_a_seed),
    Check("pages", "a page_size out of range is INVALID_ARGUMENT", pages),
)
