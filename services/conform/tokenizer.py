"""What a tokenizer must do: text in, text out that is exactly what its tokens mean, ends where they were asked for."""

import hashlib
import io
import time
import uuid
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

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
)
from tercet.v1 import common_pb2, tokenizer_pb2

if TYPE_CHECKING:
    from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

SERVICE: Final = "tercet.v1.TokenizerService"
INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
GENERATE_S: Final = 30.0
LATE_S: Final = 0.2
SHORT: Final = 16
PROMPT: Final = "The quick brown fox"
TEXTS: Final = (
    "hello",
    "two  spaces,\ttabs\nand lines\r\n",
    "naïve café — 12345 + 67.89",
    "世界 こんにちは 안녕",
    "👩‍👩‍👧‍👦 e\u0301 \u200b",
    "def f(x):\n    return x  # code\n",
    "<|im_start|><|endoftext|></s>[INST]",
)

Request = tokenizer_pb2.TokenizerServiceGenerateRequest


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The subject of the checks."""

    channel: grpc.aio.Channel
    stub: "TokenizerServiceAsyncStub"
    told: tokenizer_pb2.TokenizerServiceDescribeResponse


@dataclass(frozen=True, slots=True)
class Answer:
    accepted: tokenizer_pb2.Accepted
    text: str
    token_ids: list[int]
    finished: tokenizer_pb2.Finished


async def meet(channel: grpc.aio.Channel, stub: "TokenizerServiceAsyncStub") -> Tokenizer:
    told = await stub.Describe(tokenizer_pb2.TokenizerServiceDescribeRequest(), timeout=ANSWER_S)
    return Tokenizer(channel, stub, told)


def request(max_tokens: int = SHORT, **changes: Any) -> Request:
    """Greedy, of exactly max_tokens, under an id of its own."""
    message = Request(
        context=common_pb2.RequestContext(request_id=f"conform-{uuid.uuid4().hex}"),
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=1, ignore_eos=True, max_tokens=max_tokens),
        return_prompt_ids=True,
        **changes,
    )
    if message.WhichOneof("prompt") is None:
        message.text = PROMPT
    return message


async def whole(tokenizer: Tokenizer, message: Request, **options: Any) -> Answer:
    accepted = finished = None
    text = ""
    tokens: list[int] = []
    async for event in tokenizer.stub.Generate(message, timeout=GENERATE_S, **options):
        kind = event.WhichOneof("event")
        require(finished is None, f"{kind} came behind Finished")
        match kind:
            case "accepted":
                require(accepted is None and not tokens, "Accepted is not the first event, or came twice")
                accepted = event.accepted
            case "delta":
                require(accepted is not None, "a delta came before Accepted")
                text += event.delta.text
                tokens.extend(event.delta.token_ids)
            case "finished":
                finished = event.finished
            case other:
                fail(f"an event {other} that was not asked for")
    if accepted is None or finished is None:
        fail(f"the stream ended well without {'Accepted' if accepted is None else 'Finished'}")
    return Answer(accepted, text, tokens, finished)


async def encode(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    message = tokenizer_pb2.TokenizerServiceTokenizeRequest(text=text, add_special_tokens=special)
    return list((await tokenizer.stub.Tokenize(message, timeout=ANSWER_S)).token_ids)


async def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    message = tokenizer_pb2.TokenizerServiceDetokenizeRequest(token_ids=ids)
    return (await tokenizer.stub.Detokenize(message, timeout=ANSWER_S)).text


async def describe(tokenizer: Tokenizer) -> None:
    told = tokenizer.told
    require(told.schema_revision == common_pb2.SCHEMA_REVISION_ONE, "schema_revision is not SCHEMA_REVISION_ONE")
    require(told.model.name and told.model.vocab_size >= 2, "model is not filled in")
    require(len(told.model.tokenizer_hash) == 64, f"model.tokenizer_hash is {told.model.tokenizer_hash!r}")
    require(told.numerics, "numerics is empty: the chain behind it is not complete")


async def health(tokenizer: Tokenizer) -> None:
    await check_health(tokenizer.channel, SERVICE)


async def round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = await encode(tokenizer, text)
        require(all(one < tokenizer.told.model.vocab_size for one in ids), f"{text!r}: an id outside the vocabulary")
        back = await decode(tokenizer, ids)
        # Vocabularies of SentencePiece's kind put a space before a text.
        require(back in (text, f" {text}"), f"{text!r} came back as {back!r}")
    require(await encode(tokenizer, "") == [], "an empty text has tokens")


async def pieces(tokenizer: Tokenizer) -> None:
    message = tokenizer_pb2.TokenizerServiceTokenizeRequest(text=TEXTS[3], return_pieces=True)
    told = await tokenizer.stub.Tokenize(message, timeout=ANSWER_S)
    require(len(told.pieces) == len(told.token_ids), f"{len(told.pieces)} pieces of {len(told.token_ids)} ids")
    joined = b"".join(told.pieces).decode(errors="replace")
    require(joined.lstrip(" ") == TEXTS[3], f"the pieces of {TEXTS[3]!r} are {joined!r} together")


async def ids_outside(tokenizer: Tokenizer) -> None:
    message = tokenizer_pb2.TokenizerServiceDetokenizeRequest(token_ids=[2**32 - 1])
    found = await refusal(
        tokenizer.stub.Detokenize(message, timeout=ANSWER_S), INVALID, what="the text of an id outside the vocabulary"
    )
    require_field(found, "token_ids")


async def accepted(tokenizer: Tokenizer) -> None:
    message = request()
    told = (await whole(tokenizer, message)).accepted
    require(told.request_id == message.context.request_id, f"Accepted tells the id {told.request_id!r}")
    require(told.model == tokenizer.told.model.name, f"Accepted tells the model {told.model!r}")
    require(told.numerics == tokenizer.told.numerics, "Accepted tells other numerics than Describe")
    prompt = await encode(tokenizer, PROMPT, special=True)
    require(list(told.prompt_ids) == prompt, f"Accepted tells the prompt {list(told.prompt_ids)}; Tokenize {prompt}")
    require(told.prompt_tokens == len(prompt), f"prompt_tokens is {told.prompt_tokens}; {len(prompt)} ids were read")


async def usage(tokenizer: Tokenizer) -> None:
    answer = await whole(tokenizer, request())
    told = answer.finished.usage
    require(answer.finished.reason == common_pb2.FINISH_REASON_LENGTH, "an answer cut by max_tokens ended otherwise")
    require(len(answer.token_ids) == SHORT, f"{len(answer.token_ids)} ids came; {SHORT} were asked for")
    require(told.delivered_tokens == SHORT, f"delivered_tokens is {told.delivered_tokens}, not {SHORT}")
    total = told.delivered_tokens + told.discarded_tokens
    require(told.sampled_tokens == total, "sampled is not delivered + discarded")


async def deltas(tokenizer: Tokenizer) -> None:
    for length in (1, 2, SHORT):
        answer = await whole(tokenizer, request(length))
        text = await decode(tokenizer, answer.token_ids)
        require(answer.text == text, f"the deltas are {answer.text!r} together; their ids mean {text!r}")


async def ids_as_prompt(tokenizer: Tokenizer) -> None:
    prompt = await encode(tokenizer, PROMPT, special=True)
    by_ids = await whole(tokenizer, request(token_ids=tokenizer_pb2.TokenIds(ids=prompt)))
    by_text = await whole(tokenizer, request())
    require(by_ids.token_ids == by_text.token_ids, "the same prompt as ids and as text gives other answers")


async def chat(tokenizer: Tokenizer) -> None:
    prompt = tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content="Hi. <|im_end|>")])
    message = tokenizer_pb2.TokenizerServiceRenderChatRequest(chat=prompt)
    if not tokenizer.told.has_chat_template:
        what = "a chat where there is no template"
        await refusal(
            tokenizer.stub.RenderChat(message, timeout=ANSWER_S), grpc.StatusCode.FAILED_PRECONDITION, what=what
        )
        return
    rendered = await tokenizer.stub.RenderChat(message, timeout=ANSWER_S)
    answer = await whole(tokenizer, request(chat=prompt))
    require(list(answer.accepted.prompt_ids) == list(rendered.token_ids), "Generate reads a chat other than RenderChat")


async def stop(tokenizer: Tokenizer) -> None:
    free = await whole(tokenizer, request())
    # A text's own middle, taken where characters are whole.
    at = next(
        (at for at in range(len(free.text) // 2, len(free.text) - 1) if "\ufffd" not in free.text[at : at + 2]), None
    )
    if at is None:
        raise NotApplicable("the answer has no text to stop at")
    word = free.text[at : at + 2]
    before = free.text[: free.text.index(word)]
    for include in (False, True):
        answer = await whole(tokenizer, request(stop=[word], include_stop=include))
        expected = before + word if include else before
        require(answer.finished.reason == common_pb2.FINISH_REASON_STOP, "a stop string did not end with STOP")
        require(answer.text == expected, f"stopped at {word!r} came {answer.text!r}; expected {expected!r}")
        require(answer.finished.stop_match == word, f"stop_match is {answer.finished.stop_match!r}, not {word!r}")
    used, longest = answer.finished.usage, free.finished.usage
    require(used.delivered_tokens <= longest.delivered_tokens, "a stopped answer counts more tokens than a whole one")


Spoil = Callable[[Tokenizer, Request], None]


def _stops(*stops: str) -> Spoil:
    return lambda tokenizer, message: message.stop.extend(stops)


def _temperature(tokenizer: Tokenizer, message: Request) -> None:
    message.sampling.temperature = -1


def _no_prompt(tokenizer: Tokenizer, message: Request) -> None:
    message.ClearField("text")


def _empty_ids(tokenizer: Tokenizer, message: Request) -> None:
    message.token_ids.SetInParent()


def _outside(tokenizer: Tokenizer, message: Request) -> None:
    message.token_ids.ids.append(2**32 - 1)


BAD: Final[dict[str, tuple[str, Spoil]]] = {
    "no-prompt": ("a request without a prompt", _no_prompt),
    "empty": ("an empty list of ids", _empty_ids),
    "token": ("a token outside the vocabulary", _outside),
    "temperature": ("temperature -1", _temperature),
    "stop-empty": ("an empty stop string", _stops("")),
    "stop-long": ("a stop string of 257 characters", _stops("x" * 257)),
    "stop-many": ("33 stop strings", _stops(*(f"stop {number}" for number in range(33)))),
}


def _bad(what: str, spoil: Spoil) -> Callable[[Tokenizer], Awaitable[None]]:
    async def run(tokenizer: Tokenizer) -> None:
        message = request()
        spoil(tokenizer, message)
        found = await stream_refusal(tokenizer.stub.Generate(message, timeout=GENERATE_S), INVALID, what=what)
        require(found.error.field, "the refusal names no field in BadRequest")

    return run


async def other_model(tokenizer: Tokenizer) -> None:
    message = request(model="no-such-model")
    what = "a request for another model"
    await stream_refusal(tokenizer.stub.Generate(message, timeout=GENERATE_S), grpc.StatusCode.NOT_FOUND, what=what)


async def metadata_differs(tokenizer: Tokenizer) -> None:
    rows = (("tercet-request-id", "another"),)
    what = "a request id that differs from the metadata's"
    await stream_refusal(tokenizer.stub.Generate(request(), timeout=GENERATE_S, metadata=rows), INVALID, what=what)


async def total_limit(tokenizer: Tokenizer) -> None:
    room = tokenizer.told.model.max_model_len - len(await encode(tokenizer, PROMPT, special=True))
    message = request(max(1, room))
    message.limits.total_ns = 1_000_000
    began = time.monotonic()
    try:
        answer = await whole(tokenizer, message)
    except grpc.aio.AioRpcError as error:
        check_status(error, grpc.StatusCode.DEADLINE_EXCEEDED, what="a request of 1 ms")
        return
    if len(answer.token_ids) >= room:
        took_s = time.monotonic() - began
        require(took_s < LATE_S, f"a limit of 1 ms passed and the answer went on to its end, {took_s:.2f} s")
        raise NotApplicable("a whole context is computed before a limit could be seen to pass")
    told = answer.finished.reason
    require(told == common_pb2.FINISH_REASON_TIME_LIMIT, "an answer that a limit cut did not end with TIME_LIMIT")


async def cancel(tokenizer: Tokenizer) -> None:
    """Its id is free again soon after."""
    room = tokenizer.told.model.max_model_len - len(await encode(tokenizer, PROMPT, special=True))
    message = request(max(1, room))
    stream = tokenizer.stub.Generate(message, timeout=GENERATE_S)
    async for event in stream:
        if event.HasField("finished"):
            raise NotApplicable("answers end before they can be cancelled")
        if event.HasField("delta"):
            break
    stream.cancel()
    message.sampling.max_tokens = 1
    for _ in range(200):
        try:
            await whole(tokenizer, message)
        except grpc.aio.AioRpcError as error:
            check_status(error, grpc.StatusCode.ALREADY_EXISTS, what="a request with the id of one just cancelled")
            continue
        return
    fail("the id of a cancelled request stays in use")


async def resume(tokenizer: Tokenizer) -> None:
    message = request()
    message.sampling.temperature, message.sampling.seed = 1.0, 7
    full = await whole(tokenizer, message)
    for cut in (1, SHORT // 2, SHORT):
        characters = len(await decode(tokenizer, full.token_ids[:cut]))
        # What a cut leaves of a character is told as U+FFFD by a whole decode, and not yet by a stream.
        while characters and not full.text.startswith((await decode(tokenizer, full.token_ids[:cut]))[:characters]):
            characters -= 1
        again = request()
        again.ClearField("text")
        again.context.attempt = 2
        again.sampling.CopyFrom(message.sampling)
        again.resume.prompt_ids.extend(full.accepted.prompt_ids)
        again.resume.output_ids.extend(full.token_ids[:cut])
        again.resume.chars_delivered = characters
        again.resume.numerics = tokenizer.told.numerics
        rest = await whole(tokenizer, again)
        require(rest.token_ids == full.token_ids[cut:], f"resumed behind {cut} tokens came other tokens")
        expected = full.text[characters:]
        require(rest.text == expected, f"resumed behind {cut} tokens came {rest.text!r}; expected {expected!r}")


async def archive(tokenizer: Tokenizer) -> None:
    data, told = bytearray(), None
    try:
        async for piece in tokenizer.stub.GetTokenizer(
            tokenizer_pb2.TokenizerServiceGetTokenizerRequest(), timeout=GENERATE_S
        ):
            require(len(piece.chunk) <= 256 * 1024, f"a chunk of {len(piece.chunk)} bytes")
            data += piece.chunk
            told = piece.sha256 if piece.HasField("sha256") else told
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotApplicable("GetTokenizer is not served") from None
        raise
    require(hashlib.sha256(data).hexdigest() == told, "the last chunk's sha256 is not that of what came")
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        require("tokenizer.json" in zipped.namelist(), f"there is no tokenizer.json in it: {zipped.namelist()}")


CHECKS: Final[tuple[Check[Tokenizer], ...]] = (
    Check("describe", "Describe tells model, tokenizer and numerics", describe),
    Check("health", "grpc.health.v1 tells readiness, liveness and the service by name", health),
    Check("round-trip", "Detokenize gives back what Tokenize was given", round_trip),
    Check("pieces", "the pieces of a text are its bytes", pieces),
    Check("ids", "the text of an id outside the vocabulary is INVALID_ARGUMENT", ids_outside),
    Check("accepted", "Accepted comes first and tells what was read", accepted),
    Check("usage", "one Finished comes last; sampled = delivered + discarded", usage),
    Check("deltas", "the deltas together are what their ids mean", deltas),
    Check("prompt-ids", "a prompt as ids and as text gives the same answer", ids_as_prompt),
    Check("chat", "a chat is read as RenderChat shows it", chat),
    Check("stop", "a stop string ends an answer right there", stop),
    *(
        Check(f"bad.{name}", f"{what} is INVALID_ARGUMENT before Accepted, naming a field", _bad(what, spoil))
        for name, (what, spoil) in BAD.items()
    ),
    Check("model", "another model is NOT_FOUND", other_model),
    Check("metadata", "a field that differs from its metadata is INVALID_ARGUMENT", metadata_differs),
    Check("limit", "a passed limit is DEADLINE_EXCEEDED before the first token, TIME_LIMIT behind it", total_limit),
    Check("cancel", "a caller who leaves leaves no request behind", cancel),
    Check("resume", "an answer goes on exactly behind what was delivered", resume),
    Check("archive", "GetTokenizer gives a zip that is what its SHA-256 says", archive),
)
