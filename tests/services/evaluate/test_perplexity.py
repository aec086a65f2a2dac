"""The windows and the sum by hand, and the command on a tiny model against a plain implementation."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from plain_llama import plain_logprobs
from tiny_model import TinySpec, write_tiny_model

from services.evaluate.__main__ import main, read_text
from services.evaluate.perplexity import TextTooShort, measure, windows


def test_windows_drop_an_incomplete_one_and_begin_with_bos() -> None:
    ids = list(range(10, 21))
    assert list(windows(ids, 4, None)) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert list(windows(ids, 4, 1)) == [[1, 11, 12, 13], [1, 15, 16, 17]]
    assert ids[0] == 10


def test_the_second_half_counts_but_for_its_first_token() -> None:
    calls: list[tuple[list[int], int]] = []

    def score(ids: Sequence[int], first: int) -> list[float]:
        calls.append((list(ids), first))
        return [-float(token) for token in ids[first:]]

    seen: list[int] = []
    result = measure(score, list(range(17)), 8, None, lambda done, value: seen.append(done))
    assert calls == [(list(range(8)), 5), (list(range(8, 16)), 5)]
    losses = [5, 6, 7, 13, 14, 15]
    assert result.value == pytest.approx(math.exp(sum(losses) / 6))
    assert (result.windows, result.scored_tokens) == (2, 6)
    assert result.standard_error == pytest.approx(result.value * np.std(losses, ddof=1) / math.sqrt(6))
    assert seen == [1, 2]


def test_impossible_contexts_are_named() -> None:
    with pytest.raises(ValueError, match="context must be at least 4, got 3"):
        measure(lambda ids, first: [], [1, 2, 3], 3, None)
    with pytest.raises(TextTooShort, match="the text has 3 tokens, one window takes 8"):
        measure(lambda ids, first: [], [1, 2, 3], 8, None)


def test_text_cut_inside_a_character_loses_that_character_alone(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("aé€".encode())
    assert [read_text(path, limit) for limit in (1, 2, 3, 4, 5, 6, 99, None)] == [
        "a",
        "a",
        "aé",
        "aé",
        "aé",
        "aé€",
        "aé€",
        "aé€",
    ]
    path.write_bytes(b"ab\xc3")  # the file itself ends so
    with pytest.raises(ValueError, match="not UTF-8 at byte 2"):
        read_text(path, None)
    path.write_bytes(b"a\xffb")
    with pytest.raises(ValueError, match="not UTF-8 at byte 1"):
        read_text(path, 3)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    text = tmp_path / "text"
    text.write_text("ab" * 200)
    arguments = ["perplexity", "--model", str(model), "--file", str(text), "--bytes", "100", "--context", "32"]
    assert main([*arguments, "--backend", "reference", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["windows"], result["scored_tokens"]) == (3, 45)
    ids = [97, 98] * 16  # byte tokens stand at their byte's number
    expected = math.exp(-plain_logprobs(model, ids)[16:].mean())
    assert result["value"] == pytest.approx(expected, rel=1e-4)
    assert main(arguments) == 0
    assert "over 45 tokens in 3 windows of 32, back end cpu" in capsys.readouterr().out


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    text = tmp_path / "text"
    text.write_text("short")
    arguments = ["perplexity", "--model", str(model), "--file", str(text)]
    assert main(arguments) == 1
    assert "--context is 512, the model's context is 256" in capsys.readouterr().err
    assert main([*arguments, "--context", "64"]) == 1
    assert "the text has 5 tokens, one window takes 64" in capsys.readouterr().err
    assert main(["perplexity", "--model", str(model), "--file", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
