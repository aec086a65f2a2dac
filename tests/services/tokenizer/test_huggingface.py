"""A directory of Hugging Face files: the same tokens, rules and hash as GGUF, and refusals by file and field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, GOLDEN, model_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_model
from tokenizers import Tokenizer

from services.process import StartError
from services.tokenizer.export import tokenizer_files
from services.tokenizer.huggingface import read_directory
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.loading import load_text
from services.tokenizer.templates import ChatMessage
from services.tokenizer.text import TextModel

SPACE = "\u2581"


def reread(model: TextModel) -> TextModel:
    return TextModel(read_directory(tokenizer_files(model, None, None)).vocabulary)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_exported_is_read_back_as_it_was(family: str) -> None:
    model = model_of(family)
    again = reread(model)
    assert again.hash == model.hash
    for row in GOLDEN["rows"][::7]:
        assert again.encode(row["text"], add_special=True) == model.encode(row["text"], add_special=True)


@pytest.mark.parametrize("changes", [{}, {"add_bos_token": True}, {"add_eos_token": True}, {"eos_token_id": 2}])
def test_flags_ends_and_types_are_read_back(changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    assert reread(model).hash == model.hash


@pytest.mark.model
def test_a_directory_serves_as_its_model_file_does(tmp_path: Path, default_model_path: Path) -> None:
    of_file = load_text(str(default_model_path))
    for name, content in tokenizer_files(of_file.model, of_file.template, of_file.context_length).items():
        (tmp_path / name).write_bytes(content)
    found = load_text(str(tmp_path))
    assert found.model.hash == of_file.model.hash
    assert (found.name, found.context_length) == (tmp_path.name, 8192)
    assert found.template is not None
    assert of_file.template is not None
    messages = [ChatMessage("user", "Hi")]
    assert found.template.render_chat(messages).text == of_file.template.render_chat(messages).text


def test_a_directory_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json: missing"):
        load_text(str(tmp_path))


def parts(family: str) -> dict[str, Any]:
    return {name: json.loads(content) for name, content in tokenizer_files(model_of(family), None, None).items()}


def read(files: dict[str, Any]) -> TextModel:
    encoded = {name: json.dumps(value).encode() for name, value in files.items()}
    return TextModel(read_directory(encoded).vocabulary)


def first_prefix() -> dict[str, Any]:
    """As Mistral's later files have it: a space before the first character of all alone."""
    files = parts("llama")
    files["tokenizer.json"]["normalizer"] = None
    files["tokenizer.json"]["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "first",
        "split": False,
    }
    return files


@given(st.text(alphabet=f"ab {SPACE}\n<s>/é=", max_size=30))
def test_a_space_before_the_first_character_alone(text: str) -> None:  # T06
    files = first_prefix()
    theirs = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert read(files).encode(text, add_special=True, parse_control=True) == theirs.encode(text).ids


def test_padded_vocabularies_have_tokens_that_nothing_encodes_to() -> None:
    files = parts("qwen2")
    size = len(GOLDEN["byte_level"]["tokens"])
    files["config.json"] = {"vocab_size": size + 7, "max_position_embeddings": 4096}
    model = read(files)
    assert model.vocab_size == size + 7
    assert model.decode([size + 6]) == f"[PAD{size + 6}]"
    assert max(model.encode(f"[PAD{size + 6}]", add_special=False)) < size


def test_bos_of_a_llama_3_directory_comes_from_its_post_processor() -> None:  # J02
    files = parts("llama-bpe")
    bos = "<|begin|>"
    size = len(GOLDEN["byte_level"]["tokens"])
    tokenizer = files["tokenizer.json"]
    tokenizer["added_tokens"].append({"id": size, "content": bos, "special": True})
    tokenizer["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
        ],
    }
    files["tokenizer_config.json"] = {"bos_token": {"content": bos}, "model_max_length": 10**30}
    model = read(files)
    assert model.encode("a", add_special=True)[0] == size
    assert model.encode(bos + "a", add_special=True, parse_control=True).count(size) == 1


def edited(family: str, path: str, value: object) -> dict[str, Any]:
    files = copy.deepcopy(parts(family))
    place = files["tokenizer.json"]
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return files


ADDED = {"id": 5, "content": "x", "special": True}


@pytest.mark.parametrize(
    ("family", "path", "value", "field"),
    [
        ("gpt-2", "model", 1, "model"),
        ("gpt-2", "model.type", "WordPiece", "model.type"),
        ("gpt-2", "model.dropout", 0.1, "model.dropout"),
        ("gpt-2", "model.ignore_merges", True, "pre_tokenizer"),
        ("gpt-2", "pre_tokenizer.add_prefix_space", True, "pre_tokenizer"),
        ("gpt-2", "normalizer", {"type": "Lowercase"}, "pre_tokenizer"),
        ("qwen2", "pre_tokenizer.pretokenizers.0.pattern.Regex", r"\w+", "pre_tokenizer"),
        ("llama", "normalizer", {"type": "NFKC"}, "normalizer"),
        ("t5", "pre_tokenizer", {"type": "Whitespace"}, "normalizer"),
        ("llama", "model.unk_token", None, "model"),
        ("gpt-2", "model.vocab", ["a"], "model.vocab"),
        ("gpt-2", "model.vocab", {"a": -1}, "model.vocab"),
        ("gpt-2", "model.vocab", {"a": 1, "b": 1}, "model.vocab"),
        ("t5", "model.vocab", [["a", "b"]], "model.vocab"),
        ("gpt-2", "model.merges", {}, "model.merges"),
        ("gpt-2", "model.merges.0", "a", "model.merges[0]"),
        ("gpt-2", "model.merges.0", ["a", "\u00ff\u00ff"], "model.merges[0]"),
        ("gpt-2", "added_tokens", [ADDED | {"id": 1 << 40}], "added_tokens[0].id"),
        ("gpt-2", "added_tokens", [ADDED | {"content": ""}], "added_tokens[0].content"),
        ("gpt-2", "added_tokens", [ADDED | {"rstrip": True}], "added_tokens[0].rstrip"),
        ("gpt-2", "added_tokens", [ADDED], "added_tokens"),
        ("gpt-2", "added_tokens", ["x"], "added_tokens[0]"),
        ("gpt-2", "post_processor", {"type": "BertProcessing"}, "post_processor"),
    ],
)
def test_what_is_not_known_is_refused_by_field(family: str, path: str, value: object, field: str) -> None:
    with pytest.raises(InvalidTokenizer) as refusal:
        read(edited(family, path, value))
    assert refusal.value.field == f"tokenizer.json {field}"


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("tokenizer_config.json", {"bos_token": "nowhere"}, "tokenizer_config.json bos_token"),
        ("tokenizer_config.json", {"add_bos_token": True}, "tokenizer_config.json bos_token"),
        ("tokenizer_config.json", {"chat_template": 3}, "tokenizer_config.json chat_template"),
        ("tokenizer_config.json", {"tercet_token_types": {"ODD": [1]}}, "tokenizer_config.json tercet_token_types.ODD"),
        ("generation_config.json", {"eos_token_id": [10**9]}, "generation_config.json eos_token_id"),
        ("config.json", [], "config.json"),
    ],
)
def test_what_is_wrong_beside_it_is_refused_by_file(name: str, value: object, field: str) -> None:
    with pytest.raises(InvalidTokenizer) as refusal:
        read(parts("gpt-2") | {name: value})
    assert refusal.value.field == field
