"""Ids that the model has and its tokenizer has not: logits are padded, so such an id may be drawn. It has no text."""

import json
from pathlib import Path

import httpx
import pytest
from chain import TextChain, text_chain, text_model

import tercet
from services.tokenizer.answer import Answer, AnswerRules
from services.tokenizer.text import TextModel
from tercet.v1 import common_pb2

pytestmark = pytest.mark.model

PADDING = 64
MESSAGES = [{"role": "user", "content": "x"}]


def script(model: TextModel) -> list[int]:
    """A padded id first, within a character, between two words, and last. Before it the vocabulary's own last id, whose
    runners-up are padded."""
    beyond, end = model.vocab_size + 7, model.vocab_size + PADDING - 1
    character = model.encode("世", add_special=False)
    assert len(character) > 1
    return [
        beyond,
        *character[:1],
        beyond,
        *character[1:],
        model.vocab_size - 1,
        end,
        *model.encode(" two", add_special=False),
        end,
    ]


def text_of(model: TextModel) -> str:
    return model.decode([one for one in script(model) if one < model.vocab_size])


@pytest.fixture
def model(default_model_path: Path) -> TextModel:
    return text_model(default_model_path)[0]


@pytest.mark.parametrize("keep_special", [False, True])
async def test_over_grpc(default_model_path: Path, model: TextModel, keep_special: bool) -> None:
    async with text_chain(default_model_path, script=script(model), padding=PADDING) as chain:
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.chat(MESSAGES, temperature=0, logprobs=3, keep_special_tokens=keep_special)
            async with stream:
                deltas = [delta async for delta in stream]
        ids = [one for delta in deltas for one in delta.token_ids]
        assert "".join(delta.text for delta in deltas) == text_of(model)
        assert ids[:-1] == script(model)
        assert stream.finish_reason is tercet.FinishReason.STOP
        rows = [row for delta in deltas for row in delta.logprobs]
        assert [row.drawn.token_id for row in rows] == ids
        every = [one for row in rows for one in (row.drawn, *row.top)]
        assert sum(one.token_id >= model.vocab_size for one in every) > 4
        for one in every:
            is_padded = one.token_id >= model.vocab_size
            assert one.bytes == (b"" if is_padded else model.token_bytes(one.token_id))
            assert not is_padded or one.text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(default_model_path: Path, model: TextModel, stream: bool) -> None:
    async with text_chain(default_model_path, script=script(model), padding=PADDING) as chain:
        chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
        choices = await ask(chain, "/v1/chat/completions", chat, stream)
        spoken = "".join(choice["delta" if stream else "message"].get("content") or "" for choice in choices)
        assert spoken == text_of(model)
        content = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        padded = [index for index, one in enumerate(script(model)) if one >= model.vocab_size]
        assert len(content) == len(script(model)) + 1
        for index, one in enumerate(content):
            assert ((one["token"], one["bytes"]) == ("", [])) == (index in padded)
        assert content[padded[1] + 2]["top_logprobs"][1]["bytes"] == []  # behind the vocabulary's last

        choices = await ask(chain, "/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True}, stream)
        assert "".join(choice["text"] for choice in choices) == "x" + text_of(model)
        tokens = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["tokens"]]
        assert [index - 1 for index, token in enumerate(tokens) if token == ""] == padded


async def ask(chain: TextChain, path: str, body: dict[str, object], stream: bool) -> list[dict]:  # type: ignore[type-arg]
    sent = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 64, "stream": stream, **body}
    async with httpx.AsyncClient(base_url=chain.http) as http:
        answer = await http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()["choices"][0]]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


async def test_as_a_stop_id_and_in_a_prompt(default_model_path: Path, model: TextModel) -> None:
    padded = model.vocab_size + 3
    async with (
        text_chain(default_model_path, script=[model.eos_ids[0] + 1, padded], padding=PADDING, ends=False) as chain,
        tercet.AsyncClient(chain.target) as client,
    ):
        stream = client.generate([5, padded, 6], temperature=0, stop_token_ids=[padded], prompt_logprobs=0)
        async with stream:
            deltas = [delta async for delta in stream]
        assert stream.finish_reason is tercet.FinishReason.STOP
        assert [one for delta in deltas for one in delta.token_ids][-1] == padded
        assert [(row.drawn.token_id, row.drawn.bytes) for row in stream.prompt_logprobs] == [
            (padded, b""),
            (6, model.token_bytes(6)),
        ]
        with pytest.raises(tercet.InvalidArgumentError, match="outside the vocabulary"):  # who asks for text of it
            await client.detokenize([5, padded])


def test_a_stop_string_may_go_on_behind_one(model: TextModel) -> None:
    answer = Answer(model, AnswerRules(("ab",), False, False, 0, frozenset()))
    a, b = (model.encode(one, add_special=False) for one in "ab")
    ids = [*a, model.vocab_size, *b]
    deltas = answer.push(ids, [common_pb2.TokenLogprobs()] * 3)
    assert answer.stop_string == "ab"
    assert [(delta.text, list(delta.token_ids)) for delta in deltas] == [("", ids)]
    assert [row.drawn.bytes for delta in deltas for row in delta.logprobs] == [b"a", b"", b"b"]
