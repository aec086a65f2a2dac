"""What a caller may ask of the text that comes back, over gRPC and over HTTP: both doors give the same."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from chain import TextChain, text_chain

import tercet

pytestmark = pytest.mark.model

ANSWER = "Grüße, 世界. Ende"


async def over_both(chain: TextChain, *, stop: list[str], include: bool, keep_special: bool) -> tuple[str, str, str]:
    """Text over gRPC, over HTTP whole, over HTTP streamed."""
    async with tercet.AsyncClient(chain.target) as client:
        stream = client.generate("x", temperature=0, stop=stop, include_stop=include, keep_special_tokens=keep_special)
        async with stream:
            spoken = "".join([delta.text async for delta in stream])
    body = {
        "model": "smollm2-135m",
        "prompt": "x",
        "temperature": 0,
        "max_tokens": 64,
        "stop": stop,
        "include_stop_str_in_output": include,
        "skip_special_tokens": not keep_special,
    }
    async with httpx.AsyncClient(base_url=chain.http) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        streamed = ""
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    streamed += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    return spoken, whole, streamed


@pytest.mark.parametrize(
    ("stop", "include", "keep_special", "expected"),
    [
        ([], False, False, ANSWER),
        ([], False, True, ANSWER),
        ([], True, False, ANSWER),
        ([], True, True, ANSWER + "<|endoftext|>"),
        (["世界."], False, True, "Grüße, "),
        (["世界."], True, False, "Grüße, 世界."),
    ],
)
async def test_stops_and_special_tokens(
    default_model_path: Path, stop: list[str], include: bool, keep_special: bool, expected: str
) -> None:
    async with text_chain(default_model_path, ANSWER) as chain:
        assert chain.model.token_text(min(chain.model.eos_ids)) == "<|endoftext|>"
        texts = await over_both(chain, stop=stop, include=include, keep_special=keep_special)
        assert texts == (expected,) * 3


async def test_logprobs_of_prompt_and_answer_with_text_and_bytes(default_model_path: Path) -> None:
    """Over gRPC, over HTTP whole and streamed: the same rows. "世" is two tokens, none of them a character."""
    prompt = "Grüße, 世"
    async with text_chain(default_model_path, ANSWER) as chain:
        prompt_ids = chain.model.encode(prompt, add_special=True)
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.generate(prompt, temperature=0, echo=True, logprobs=2, prompt_logprobs=2)
            async with stream:
                deltas = [delta async for delta in stream]
        rows = [*stream.prompt_logprobs, *(row for delta in deltas for row in delta.logprobs)]
        ids = [*prompt_ids[1:], *(one for delta in deltas for one in delta.token_ids)]
        assert "".join(delta.text for delta in deltas) == prompt + ANSWER
        assert [row.drawn.token_id for row in rows] == ids
        assert len(rows) > len(stream.prompt_logprobs) == len(prompt_ids) - 1
        for row in rows:
            assert len(row.top) == 2
            for one in (row.drawn, *row.top):
                assert one.bytes == chain.model.token_bytes(one.token_id)
                assert one.text == one.bytes.decode(errors="replace")
        texts = [chain.model.token_bytes(prompt_ids[0]).decode(), *(row.drawn.text for row in rows)]
        expected = {
            "tokens": texts,
            "token_logprobs": [None, *(row.drawn.logprob for row in rows)],
            "top_logprobs": [None, *({one.text: one.logprob for one in reversed(row.top)} for row in rows)],
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
        }
        body = {
            "model": "smollm2-135m",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 64,
            "echo": True,
            "logprobs": 2,
        }
        async with httpx.AsyncClient(base_url=chain.http) as http:
            whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
            pieces = await streamed_choices(http, "/v1/completions", body)
        assert (whole["text"], whole["logprobs"]) == (prompt + ANSWER, expected)
        assert "".join(piece["text"] for piece in pieces) == prompt + ANSWER
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert [one for piece in told for one in piece[name]] == expected[name]


async def test_a_chats_logprobs_are_the_same_over_both_doors(default_model_path: Path) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    async with text_chain(default_model_path, ANSWER) as chain:
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.chat(messages, temperature=0, logprobs=2)
            async with stream:
                rows = [row async for delta in stream for row in delta.logprobs]
        expected = [{**told(row.drawn), "top_logprobs": [told(one) for one in row.top]} for row in rows]
        assert b"".join(row.drawn.bytes for row in rows[:-1]).decode() == ANSWER
        body = {
            "model": "smollm2-135m",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 64,
            "logprobs": True,
            "top_logprobs": 2,
        }
        async with httpx.AsyncClient(base_url=chain.http) as http:
            whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
            pieces = await streamed_choices(http, "/v1/chat/completions", body)
        assert whole == expected
        assert [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"]["content"]] == expected


def told(one: tercet.TokenLogprob) -> dict[str, object]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}


async def streamed_choices(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    answer = await http.post(path, json={**body, "stream": True})
    return [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
