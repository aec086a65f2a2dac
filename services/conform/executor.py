"""What an executor must do: who it is, who owns it, and how its stream of steps behaves."""

import asyncio
from dataclasses import replace
from typing import Final

import grpc

from services.conform.bad_steps import BAD_STEPS, ended_as_bad
from services.conform.kit import (
    ANSWER_S,
    Check,
    NotApplicable,
    check_health,
    fail,
    require,
    require_field,
    require_reason,
    until,
)
from services.conform.owner import GREEDY, Executor, drawn, first, further, generate, owning, stream_to
from tercet.v1 import common_pb2, executor_pb2

SERVICE: Final = "tercet.v1.ExecutorService"
INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION: Final = grpc.StatusCode.FAILED_PRECONDITION
HEARTBEATS_S: Final = 5.0
SETTLE_S: Final = 0.2  # for what must not come


async def describe(executor: Executor) -> None:
    told, model = executor.description, executor.description.model
    require(told.schema_revision == common_pb2.SCHEMA_REVISION_ONE, "schema_revision is not SCHEMA_REVISION_ONE")
    for name, text in (("model_hash", model.model_hash), ("tokenizer_hash", model.tokenizer_hash)):
        is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
        require(is_hash, f"model.{name} is {text!r}; expected 64 hexadecimal digits")
    for name in ("numerics", "instance_id", "backend"):
        require(getattr(told, name), f"{name} is empty")
    require(model.name, "model.name is empty")
    for name in ("block_size", "total_blocks", "max_batched_tokens", "max_sequences"):
        require(getattr(told, name) >= 1, f"{name} is 0")
    require(told.max_sequences <= told.max_batched_tokens, "max_sequences is above max_batched_tokens")
    require(model.max_model_len >= 2, f"model.max_model_len is {model.max_model_len}")
    require(model.vocab_size >= 2, f"model.vocab_size is {model.vocab_size}")
    require(all(one < model.vocab_size for one in model.eos_token_ids), "an end id is outside the vocabulary")
    require(0 not in told.capabilities, "capabilities holds UNSPECIFIED")
    again = await executor.stub.Describe(executor_pb2.ExecutorServiceDescribeRequest(), timeout=ANSWER_S)
    require(again == told, "Describe tells another story the second time")


async def health(executor: Executor) -> None:
    await check_health(executor.channel, SERVICE)


async def claim_granted(executor: Executor) -> None:
    async with owning(executor) as owner:
        first_epoch = owner.epoch
        require(first_epoch >= 1, "the epoch is 0")
    async with owning(executor) as owner:
        require(owner.epoch > first_epoch, f"epoch {owner.epoch} follows epoch {first_epoch}: epochs only grow")
    async with stream_to(executor) as owner:
        granted = await owner.claim(takeover=True)
        told = executor.description.instance_id
        require(granted.instance_id == told, f"Granted tells instance {granted.instance_id!r}, Describe {told!r}")


async def claim_comes_first(executor: Executor) -> None:
    async with stream_to(executor) as owner:
        await owner.step(first(0, executor.prompt(2), range(executor.blocks_for(2))))
        await owner.end(INVALID, what="a stream that begins with a step")
    async with owning(executor) as owner:
        await owner.ask("again")
        await owner.end(INVALID, what="a second claim on a stream")


async def claim_other_model(executor: Executor) -> None:
    async with stream_to(executor) as owner:
        await owner.ask(model_hash="0" * 64)
        found = await owner.end(PRECONDITION, what="a claim for another model")
        require_reason(found, "MODEL_MISMATCH")


async def claim_other_schema(executor: Executor) -> None:
    async with stream_to(executor) as owner:
        await owner.ask(schema_revision=common_pb2.SCHEMA_REVISION_UNSPECIFIED)
        found = await owner.end(PRECONDITION, what="a claim without a schema revision")
        require_reason(found, "SCHEMA_MISMATCH")


async def claim_bad_name(executor: Executor) -> None:
    for name in ("", "a b", "x" * 129):
        async with stream_to(executor) as owner:
            await owner.ask(name)
            await owner.end(INVALID, what=f"a claim by {name[:10]!r}")


async def lease_held(executor: Executor) -> None:
    async with owning(executor, scheduler_id="conform-one") as holder:
        async with stream_to(executor) as other:
            await other.ask("conform-two")
            found = await other.end(PRECONDITION, what="a claim while the lease is held")
            named = found.error.metadata.get("holder")
            require(named == "conform-one", f"ErrorInfo.metadata.holder is {named!r}; expected the holder")
        await holder.run(first(0, executor.prompt(2), range(executor.blocks_for(2))))


async def lease_released(executor: Executor) -> None:
    async with owning(executor) as owner:
        await owner.step(first(0, executor.prompt(2), range(executor.blocks_for(2))))
        await owner.call.done_writing()
        drawn(await owner.result())
        await owner.end(grpc.StatusCode.OK, what="a stream whose owner has left")

    async def is_free() -> bool:
        async with stream_to(executor) as owner:
            try:
                await owner.claim()
            except grpc.aio.AioRpcError as error:
                require(error.code() is PRECONDITION, f"a claim ended with {error.code().name}")
                return False
            return True

    await until(is_free, "a claim after the owner has left")
    await until(is_free, "a claim after the owner's call was cancelled")


async def takeover(executor: Executor) -> None:
    async with owning(executor) as old, stream_to(executor) as new:
        await old.run(first(0, executor.prompt(3), range(executor.blocks_for(8))))
        await new.claim("conform-new", takeover=True)
        require(new.epoch > old.epoch, f"the new owner's epoch is {new.epoch}, the old one's {old.epoch}")
        found = await old.end(PRECONDITION, what="the stream of an owner that was ousted")
        require_reason(found, "LEASE_LOST")
        await new.run(first(0, executor.prompt(2), range(executor.blocks_for(2))))


async def heartbeats(executor: Executor) -> None:
    async with owning(executor) as owner:
        try:
            async with asyncio.timeout(HEARTBEATS_S):
                for _ in range(2):
                    message = await owner.read()
                    kind = message.WhichOneof("message")
                    require(kind == "heartbeat", f"an idle executor sent {kind}")
                    require(not message.heartbeat.step_id, "an idle executor tells a step that it runs")
        except TimeoutError:
            fail(f"fewer than 2 heartbeats in {HEARTBEATS_S:g} s: one a second is due")


async def steps_in_order(executor: Executor) -> None:
    prompt = executor.prompt(3)
    async with owning(executor) as owner:
        await generate(owner, 0, prompt, 6, range(executor.blocks_for(len(prompt) + 6)))


async def two_in_flight(executor: Executor) -> None:
    prompt = executor.prompt(3)
    blocks = range(executor.blocks_for(len(prompt) + 4))
    async with owning(executor) as owner:
        alone = await generate(owner, 0, prompt, 4, blocks)
    async with owning(executor) as owner:
        await owner.step(first(0, prompt, blocks))
        for at in range(3):
            await owner.step(further(0, len(prompt) + at))
        together = [token for _ in range(4) for token in drawn(await owner.result())]
    require(together == alone, f"steps sent ahead drew {together}; one after the other {alone}")


async def repeated_step(executor: Executor) -> None:
    prompt = executor.prompt(3)
    async with owning(executor) as owner:
        order = owner.order(first(0, prompt, range(executor.blocks_for(8))))
        message = executor_pb2.ExecutorServiceRunRequest(step=order)
        for _ in range(2):
            await owner.send(message)
        drawn(await owner.result())
        await owner.run(further(0, len(prompt)))
        await owner.call.done_writing()
        await owner.end(grpc.StatusCode.OK, what="a stream whose owner has left", quiet=True)


async def step_gap(executor: Executor) -> None:
    async with owning(executor) as owner:
        await owner.step(first(0, executor.prompt(2), range(executor.blocks_for(2))), step_id=2)
        await owner.end(INVALID, what="step 2 without a step 1")


async def stale_epoch(executor: Executor) -> None:
    async with owning(executor) as owner:
        await owner.step(first(0, executor.prompt(2), range(executor.blocks_for(2))), epoch=owner.epoch - 1)
        found = await owner.end(PRECONDITION, what="a step of the epoch before")
        require_reason(found, "STALE_EPOCH")


async def epoch_starts_empty(executor: Executor) -> None:
    prompt = executor.prompt(3)
    async with owning(executor) as owner:
        await owner.run(first(0, prompt, range(executor.blocks_for(8))))
    async with owning(executor) as owner:
        await owner.step(further(0, len(prompt)))
        await owner.end(INVALID, what="a slice that goes on with a sequence of the epoch before")


async def same_alone(executor: Executor) -> None:
    """Greedy tokens, whatever is beside them, and again with a seed."""
    prompts = _some_prompts(executor)
    async with owning(executor) as owner:
        alone = [await generate(owner, 0, prompt, 4, range(executor.blocks_for(len(prompt) + 4))) for prompt in prompts]
    async with owning(executor) as owner:
        blocks = executor.blocks_for(max(map(len, prompts)) + 4)
        rows = [first(slot, ids, range(slot * blocks, (slot + 1) * blocks)) for slot, ids in enumerate(prompts)]
        together = [[token] for token in await owner.run(*rows)]
        for at in range(3):
            rows = [further(slot, len(ids) + at) for slot, ids in enumerate(prompts)]
            for tokens, token in zip(together, await owner.run(*rows), strict=True):
                tokens.append(token)
    require(together == alone, f"in one batch the sequences drew {together}; alone {alone}")


async def same_in_chunks(executor: Executor) -> None:
    prompt = executor.prompt(_long(executor))
    blocks = range(executor.blocks_for(len(prompt) + 3))
    cut = len(prompt) // 2
    async with owning(executor) as owner:
        whole = await generate(owner, 0, prompt, 3, blocks)
    async with owning(executor) as owner:
        rest = executor.blocks_for(cut)
        await owner.run(first(0, prompt[:cut], blocks[:rest], prompt_len=len(prompt), samples=False))
        chunked = await owner.run(further(0, cut, blocks[rest:], prompt[cut:]))
        for at in range(2):
            chunked += await owner.run(further(0, len(prompt) + at))
    require(chunked == whole, f"a prompt in two slices gave {chunked}; in one {whole}")


async def same_from_cache(executor: Executor) -> None:
    size = executor.description.block_size
    if _long(executor) <= size:
        raise NotApplicable("a block is as long as the longest prompt that can be tried")
    prompt = executor.prompt(_long(executor))
    blocks = list(range(executor.blocks_for(len(prompt) + 3)))
    other = len(blocks)
    if other + len(blocks) > executor.description.total_blocks or executor.description.max_sequences < 2:
        raise NotApplicable("the pool is too small for two sequences")
    async with owning(executor) as owner:
        whole = await generate(owner, 0, prompt, 3, blocks)
        shared = [blocks[0], *range(other, other + len(blocks) - 1)]
        again = await owner.run(first(1, prompt[size:], shared, cached=prompt[:size]))
        for at in range(2):
            again += await owner.run(further(1, len(prompt) + at))
    require(again == whole, f"with its first block from another sequence a prompt gave {again}; alone {whole}")


async def blocks_are_reused(executor: Executor) -> None:
    one, two = executor.prompt(5), executor.prompt(5, first=11)
    blocks = range(executor.blocks_for(9))
    async with owning(executor) as owner:
        alone = await generate(owner, 0, two, 4, blocks)
    async with owning(executor) as owner:
        await generate(owner, 0, one, 4, blocks)
        after = await generate(owner, 0, two, 4, blocks)
    require(after == alone, f"in blocks that another sequence had used, a sequence drew {after}; alone {alone}")


async def logprobs(executor: Executor) -> None:
    if executor_pb2.EXECUTOR_CAPABILITY_LOGPROBS not in executor.description.capabilities:
        raise NotApplicable("EXECUTOR_CAPABILITY_LOGPROBS is not among its capabilities")
    prompt, top = executor.prompt(3), min(3, executor.vocab_size)
    async with owning(executor) as owner:
        await owner.step(first(0, prompt, range(executor.blocks_for(5)), replace(GREEDY, logprobs=top)))
        (result,) = (await owner.result()).results
        require(len(result.logprobs) == len(result.token_ids), "not one entry of logprobs for each token")
        ranked = [entry.logprob for entry in result.logprobs[0].top]
        require(len(ranked) == top, f"{len(ranked)} likeliest came; {top} were asked for")
        require(ranked == sorted(ranked, reverse=True), "the likeliest are not in falling order")
        require(all(value <= 0 for value in (*ranked, result.logprobs[0].drawn)), "a logprob is above 0")
        greedy = result.logprobs[0].top[0]
        require(greedy.token_id == result.token_ids[0], "at temperature 0 the token drawn is not the likeliest")


async def cancelled_owner(executor: Executor) -> None:
    async with owning(executor) as owner:
        await owner.step(first(0, executor.prompt(3), range(executor.blocks_for(8))))
        owner.call.cancel()
        await asyncio.sleep(SETTLE_S)
    async with owning(executor) as owner:
        await owner.run(first(0, executor.prompt(2), range(executor.blocks_for(2))))


async def rows_fail_alone(executor: Executor) -> None:
    """Nothing that an owner may send makes a row fail: this looks at one that fails by itself."""
    prompts = _some_prompts(executor)
    async with owning(executor) as owner:
        blocks = executor.blocks_for(max(map(len, prompts)) + 4)
        await owner.step(
            *(first(slot, ids, range(slot * blocks, (slot + 1) * blocks)) for slot, ids in enumerate(prompts))
        )
        bad = {one.slot for one in (await owner.result()).results if one.HasField("error")}
        if not bad:
            raise NotApplicable("no row failed by itself, and an owner can't make one fail")
        require(len(bad) < len(prompts), "every row failed")
        await owner.step(*(further(slot, len(ids)) for slot, ids in enumerate(prompts)))
        for one in (await owner.result()).results:
            is_bad = one.HasField("error")
            require(is_bad or one.slot not in bad, f"slot {one.slot} drew a token behind its error")
            require(not is_bad or one.slot in bad, f"slot {one.slot} failed with its neighbour")


async def too_many_tokens(executor: Executor) -> None:
    told = executor.description
    length = told.max_batched_tokens + 1
    if length > told.model.max_model_len or executor.blocks_for(length) > told.total_blocks:
        raise NotApplicable("no sequence is longer than max_batched_tokens")
    async with owning(executor) as owner:
        await owner.step(first(0, executor.prompt(length), range(executor.blocks_for(length))))
        await owner.end(INVALID, what=f"a step of {length} tokens, max_batched_tokens is {told.max_batched_tokens}")


async def step_that_does_not_follow(executor: Executor) -> None:
    prompt = executor.prompt(3)
    async with owning(executor) as owner:
        await owner.run(first(0, prompt, range(executor.blocks_for(8))))
        await owner.step(further(0, len(prompt) + 1))
        found = await owner.end(INVALID, what="a slice that leaves a position out")
        require_field(found, "step")


def _long(executor: Executor) -> int:
    told = executor.description
    return max(2, min(2 * told.block_size + 1, told.max_batched_tokens, told.model.max_model_len - 4))


def _some_prompts(executor: Executor) -> list[tuple[int, ...]]:
    told = executor.description
    count = min(3, told.max_sequences, told.max_batched_tokens // 8, told.total_blocks // executor.blocks_for(12))
    if count < 2:
        raise NotApplicable("two sequences don't fit into one step")
    return [executor.prompt(4 + number, first=3 + 5 * number) for number in range(count)]


CHECKS: Final[tuple[Check[Executor], ...]] = (
    Check("describe", "Describe is complete and constant", describe),
    Check("health", "grpc.health.v1 tells readiness, liveness and the service by name", health),
    Check("claim.granted", "a claim is granted, with an epoch above the last", claim_granted),
    Check("claim.first", "the stream's first message, and no other, is a claim", claim_comes_first),
    Check("claim.model", "a claim for another model is FAILED_PRECONDITION", claim_other_model),
    Check("claim.schema", "a claim in another contract is FAILED_PRECONDITION", claim_other_schema),
    Check("claim.name", "a malformed scheduler_id is INVALID_ARGUMENT", claim_bad_name),
    Check("lease.held", "a held lease refuses a claim and names the holder", lease_held),
    Check("lease.released", "an owner who leaves gets what it is owed, and the lease is free", lease_released),
    Check("lease.takeover", "takeover ousts the holder with LEASE_LOST", takeover),
    Check("lease.cancelled", "a cancelled owner leaves nothing behind", cancelled_owner),
    Check("heartbeats", "a heartbeat comes every second", heartbeats),
    Check("step.order", "results come in the order of the steps", steps_in_order),
    Check("step.ahead", "steps sent before the last is answered draw the same", two_in_flight),
    Check("step.repeated", "a step that comes again is ignored", repeated_step),
    Check("step.gap", "a step id left out ends the stream INVALID_ARGUMENT", step_gap),
    Check("step.stale", "a step of another epoch ends the stream FAILED_PRECONDITION", stale_epoch),
    Check("step.follows", "a slice starts where the slot's last one ended", step_that_does_not_follow),
    Check("step.tokens", "more than max_batched_tokens are INVALID_ARGUMENT", too_many_tokens),
    *(
        Check(f"bad.{name}", f"{what} ends the stream INVALID_ARGUMENT", ended_as_bad(what, spoil))
        for name, (what, spoil) in BAD_STEPS.items()
    ),
    Check("epoch.empty", "an epoch starts with empty slots", epoch_starts_empty),
    Check("same.batch", "tokens don't depend on what is in the batch", same_alone),
    Check("same.chunks", "tokens don't depend on how the prompt is cut", same_in_chunks),
    Check("same.cached", "tokens don't depend on whose blocks hold the prompt", same_from_cache),
    Check("same.blocks", "tokens don't depend on who had the blocks before", blocks_are_reused),
    Check("logprobs", "logprobs come where they are asked for, likeliest first", logprobs),
    Check("row-error", "a row that fails fails alone", rows_fail_alone),
)
