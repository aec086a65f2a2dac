"""Deltas against the decoding of the whole, for text, for garbage and for every cut."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_model

from executor.loading.gguf import open_gguf
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.text import TextModel, load_tokenizer


def of_chunks(chunks: list[bytes]) -> Detokenizer:
    """Ids are places in the list."""
    return Detokenizer(lambda i: chunks[i], lambda i: False)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


# Heads and tails of UTF-8 sequences are likely, so that valid, invalid and cut ones all occur.
pieces = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=2).map(str.encode),
    st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC2, 0xE0, 0xA0, 0xED, 0xF0, 0x90, 0xF4, 0xFF]), max_size=4).map(
        bytes
    ),
)


@given(st.lists(pieces, max_size=12))
def test_deltas_joined_are_the_decoding_of_all_bytes(chunks: list[bytes]) -> None:  # T03
    deltas = stream(of_chunks(chunks), list(range(len(chunks))))
    assert "".join(deltas) == b"".join(chunks).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.data())
def test_valid_text_never_shows_a_replacement_and_waits_for_one_character_at_most(
    text: str, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    chunks = [raw[a:b] for a, b in pairwise(cuts)]
    detokenizer = of_chunks(chunks)
    out = ""
    for i, end in enumerate(cuts[1:]):
        out += detokenizer.push([i])
        held = raw[:end][len(out.encode()) :]
        assert len(held) < 4
        assert detokenizer.is_mid_character == bool(held)
        assert text.startswith(out)  # T01, T05
    assert out == text
    assert detokenizer.flush() == ""


@given(st.text(max_size=12), st.integers(0, 40))
def test_an_end_in_the_middle_of_a_character_is_settled_once(text: str, cut: int) -> None:  # T04
    raw = text.encode()[:cut]
    detokenizer = of_chunks([bytes([b]) for b in raw])
    assert "".join(stream(detokenizer, list(range(len(raw))))) == raw.decode("utf-8", errors="replace")
    assert detokenizer.flush() == ""


def test_held_bytes_then_ascii_come_in_order() -> None:
    chunks = ["漢".encode() + b"\xe5", b"\xad", b"\x97a\xe5", b"b"]
    assert stream(of_chunks(chunks), [0, 1, 2, 3]) == ["漢", "", "字a", "\ufffdb", ""]


def test_special_tokens_are_no_text_unless_asked_for() -> None:
    model = tiny_model()
    raw = model.encode("é", add_special=False)
    ids = [0, raw[0], 1, raw[1], 1]
    for skip, text in ((True, "é"), (False, "<s>\ufffd<|im_end|>\ufffd<|im_end|>")):
        detokenizer = Detokenizer(model.token_bytes, model.is_special, skip_special=skip)
        assert "".join(stream(detokenizer, ids)) == model.decode(ids, skip_special=skip) == text


def test_a_leading_space_is_the_tokens_own() -> None:  # T06
    model = tiny_model()
    for text in (" hello", "  hello", "hello"):
        ids = [1, *model.encode(text, add_special=False)]
        assert "".join(stream(Detokenizer(model.token_bytes, model.is_special), ids)) == text


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> TextModel:
    with open_gguf(default_model_path) as file:
        return load_tokenizer(file.metadata)


@pytest.mark.model
@pytest.mark.parametrize("skip_special", [True, False])
def test_random_ids_of_the_real_vocabulary_at_random_cuts(smollm: TextModel, skip_special: bool) -> None:  # T03
    rng = random.Random(7)
    partial = [i for i in range(smollm.vocab_size) if smollm.token_bytes(i).decode("utf-8", "replace")[-1:] == "\ufffd"]
    for _ in range(400):
        ids = [rng.choice(partial) if rng.random() < 0.5 else rng.randrange(smollm.vocab_size) for _ in range(60)]
        detokenizer = Detokenizer(smollm.token_bytes, smollm.is_special, skip_special=skip_special)
        out, at = "", 0
        while at < len(ids):
            step = rng.randrange(1, 5)
            out += detokenizer.push(ids[at : at + step])
            at += step
        assert out + detokenizer.flush() == smollm.decode(ids, skip_special=skip_special)


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    ["👨‍👩‍👧‍👦👩🏽‍💻🏳️‍🌈🇫🇷🇯🇵", "𠀀𠀁漢字", "ภาษาไทย", "e\u0301n\u0303", "dGhpcyBpcyBhIGJhc2U2NCBibG9i" * 20],
    ids=["emoji", "cjk", "thai", "combining", "base64"],
)
def test_no_replacement_and_no_burst_in_real_tokens(smollm: TextModel, text: str) -> None:  # T01, T05
    ids = smollm.encode(text, add_special=False)
    detokenizer = Detokenizer(smollm.token_bytes, smollm.is_special)
    out = raw = b""
    for i in ids:
        raw += smollm.token_bytes(i)
        out += detokenizer.push([i]).encode()
        assert 0 <= len(raw) - len(out) < 4
    assert out.decode() == text
