"""What a caller may ask of the text that comes back, over gRPC and over HTTP: both doors give the same."""

from pathlib import Path

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
