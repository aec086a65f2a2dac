"""Inputs with which users of other servers got wrong answers, or none for anybody: refused by name, or served exactly.

Over both doors, gateway and gRPC, with the default model's tokenizer. Neighbours that run meanwhile notice nothing.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from chain import TextChain, text_chain

import tercet
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

pytestmark = pytest.mark.model

ANSWER = "One two three four five six."
HARD_TEXTS = (
    "a\x00b",
    "\ufeffbom",
    "\x01\x02\x1b[0m\x7f\x85",
    "e\u0301 \u00e9",  # not in one normal form
    "\u202eabc\u202c",
    "👩\u200d👩\u200d👧\u200d👦🇺🇳🤷🏽\u200d♀️",
    "𠀀𪚥",
    " leading,  double   ",
    "    .  n't , x",
    "<|im_end|><0xEA>",
    "a" + "\u0301" * 5000,
)


async def code_and_field(call: Any) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), from_rpc_error(caught.value).field


async def live_neighbours(chain: TextChain, count: int) -> list[asyncio.Task[str]]:
    async def one(client: httpx.AsyncClient) -> str:
        body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 40, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        return str(answer.json()["choices"][0]["text"])

    async def run() -> str:
        async with httpx.AsyncClient(base_url=chain.http, timeout=30) as client:
            return await one(client)

    return [asyncio.create_task(run()) for _ in range(count)]


async def test_ids_outside_the_vocabulary_and_lists_beyond_their_limits(default_model_path: Path) -> None:
    async with text_chain(default_model_path, ANSWER) as chain, make_channel(chain.target) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        beside = await live_neighbours(chain, 8)
        vocab = chain.model.vocab_size
        for token_id in (vocab, vocab + 1, 2**31 - 1, 2**32 - 2):
            asked = {
                "prompt_ids": tokenizer_pb2.TokenizerServiceGenerateRequest(
                    token_ids=tokenizer_pb2.TokenIds(ids=[5, token_id])
                ),
                "sampling.stop_token_ids": tokenizer_pb2.TokenizerServiceGenerateRequest(
                    text="a", sampling=common_pb2.SamplingParams(stop_token_ids=[token_id])
                ),
                "sampling.logit_bias": tokenizer_pb2.TokenizerServiceGenerateRequest(
                    text="a",
                    sampling=common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(token_id=token_id, bias=1.0)]),
                ),
            }
            for field, message in asked.items():
                code, named = await code_and_field(stub.Generate(message))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert named is not None
                assert named.startswith(field) or (field == "prompt_ids" and named.startswith("token_ids")), named
        async with httpx.AsyncClient(base_url=chain.http, timeout=30) as client:
            bodies: list[tuple[str, dict[str, Any]]] = [
                *(("prompt", {"prompt": [one]}) for one in (vocab, -1, 2**31, 2**64)),
                *(("stop_token_ids", {"stop_token_ids": [one]}) for one in (vocab, -1, 2**32)),
                ("stop_token_ids", {"stop_token_ids": list(range(100_000))}),
                *(("logit_bias", {"logit_bias": {one: 1}}) for one in (str(vocab), "-1", "2147483648", "x", "")),
                ("logit_bias", {"logit_bias": {str(one): 1 for one in range(100_000)}}),
                ("logit_bias", {"logit_bias": {"5": 100.5}}),
                *(("n", {"n": one}) for one in (0, -1, 129, 10**6)),
                *(("best_of", {"best_of": one}) for one in (2, 10**6)),
                *(("logprobs", {"logprobs": one}) for one in (-1, 21, vocab - 1, vocab)),
                *(("prompt_logprobs", {"prompt_logprobs": one}) for one in (-1, vocab - 1)),
                ("stop", {"stop": [str(one) for one in range(1000)]}),
                ("stop", {"stop": ""}),
                ("stop", {"stop": ["a" * 257]}),
                *(("temperature", {"temperature": one}) for one in (-1e-12, 101)),
            ]
            for param, more in bodies:
                body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 1, **more}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 400, (more, answer.text)
                assert answer.json()["error"]["param"].startswith(param), (str(more)[:80], answer.text)
        assert {await one for one in beside} == {ANSWER}
        assert not chain.scheduler.engine.live_requests()


async def test_hard_texts_survive_both_doors_and_both_ways(default_model_path: Path) -> None:
    for text in HARD_TEXTS[:-1]:  # as the model's answer
        async with text_chain(default_model_path, text) as chain:
            async with tercet.AsyncClient(chain.target) as client:
                stream = client.generate("a", max_tokens=200, temperature=0, keep_special_tokens=True)
                pieces = [delta.text async for delta in stream]
                assert "".join(pieces) == text
                assert not any("\ufffd" in piece for piece in pieces)
            async with httpx.AsyncClient(base_url=chain.http, timeout=30) as http:
                body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 200, "skip_special_tokens": False}
                whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
                assert whole["text"] == text
                assert whole["finish_reason"] == "stop"
    async with text_chain(default_model_path, ANSWER) as chain, tercet.AsyncClient(chain.target) as client:
        for text in HARD_TEXTS:  # as the user's
            ids = await client.tokenize(text)
            assert list(ids) == list(chain.model.encode(text, add_special=False))
            assert await client.detokenize(ids) == text


async def test_an_answer_cut_in_the_middle_of_a_character_is_the_decoding_of_its_tokens(
    default_model_path: Path,
) -> None:
    text = "汉字 👩\u200d👧 𠀀"
    async with text_chain(default_model_path, text) as chain:
        ids = chain.model.encode(text, add_special=False)
        async with httpx.AsyncClient(base_url=chain.http, timeout=30) as client:
            for count in range(1, len(ids) + 1):
                body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": count, "temperature": 0, "logprobs": 2}
                choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
                streamed, tokens = "", 0
                async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            for part in json.loads(line[6:])["choices"]:
                                streamed += part["text"]
                                tokens += len((part["logprobs"] or {"tokens": ()})["tokens"])
                assert choice["text"] == streamed == chain.model.decode(ids[:count])
                assert len(choice["logprobs"]["token_logprobs"]) == tokens == count
                assert choice["finish_reason"] == "length"


async def test_large_prompts_are_tokenized_whole_by_many_at_once(default_model_path: Path) -> None:
    async with text_chain(default_model_path, ANSWER, max_prompt_bytes=4 << 20) as chain:
        sizes = [1_000, 8_000, 32_000, 128_000]
        texts = {size: "word " * size for size in sizes}
        wanted = {size: len(chain.model.encode(text, add_special=False)) for size, text in texts.items()}

        async with tercet.AsyncClient(chain.target) as client:

            async def ask(size: int) -> None:
                ids = await client.tokenize(texts[size])
                assert len(ids) == wanted[size]
                assert await client.detokenize(ids) == texts[size]

            await asyncio.gather(*(ask(size) for size in sizes * 4))
