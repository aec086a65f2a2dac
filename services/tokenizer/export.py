"""The tokenizer as the directory that other tools read, and as a zip of it.

Owns the files' names and contents, made of the one `TextModel` that serves. Knows no file system and no wire.
Invariant: equal models give equal bytes; ids of `tokenizer.json` are those of `TextModel.encode(parse_control=True)`,
but that characters whose bytes the vocabulary lacks are dropped by other tools, where we refuse them.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from services.tokenizer.huggingface import TYPES_KEY
from services.tokenizer.templates import ChatTemplate
from services.tokenizer.text import TextModel

CHUNK_BYTES: Final = 256 * 1024
FILES: Final = frozenset(
    ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
)
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold: the same bytes at every export


@dataclass(frozen=True, slots=True)
class TokenizerZip:
    """data: a zip without folders. sha256: of `data`, hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[bytes]:
        """In order, each at most CHUNK_BYTES, at least one."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            yield self.data[start : start + CHUNK_BYTES]


def tokenizer_files(model: TextModel, template: ChatTemplate | None, max_model_len: int | None) -> dict[str, bytes]:
    """Name to content. max_model_len: tokens of one sequence; None: not told."""
    special: dict[str, object] = {}
    if model.bos_id is not None:
        special["bos_token"] = model.token_text(model.bos_id)
    if model.eos_id is not None:
        special["eos_token"] = model.token_text(model.eos_id)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    config["add_bos_token"], config["add_eos_token"] = model.adds
    if unspoken := model.other_types():
        config[TYPES_KEY] = unspoken
    if max_model_len is not None:
        config["model_max_length"] = max_model_len
    if template is not None:
        config["chat_template"] = template.source
    generation = {"eos_token_id": list(model.eos_ids)} | (
        {} if model.bos_id is None else {"bos_token_id": model.bos_id}
    )
    return {
        "tokenizer.json": model.to_json().encode(),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(special),
        "generation_config.json": _json(generation),
    }


def pack(files: Mapping[str, bytes]) -> TokenizerZip:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    data = buffer.getvalue()
    return TokenizerZip(data, hashlib.sha256(data).hexdigest())


def unpack(data: bytes, names: frozenset[str]) -> dict[str, bytes]:
    """The files of a zip made by `pack`. Raises ValueError for anything else than `names`, and for what is no zip."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = frozenset(archive.namelist())
            if found != names:
                raise ValueError(f"a tokenizer's zip holds {', '.join(sorted(names))}, this {', '.join(sorted(found))}")
            return {name: archive.read(name) for name in sorted(names)}
    except zipfile.BadZipFile as error:
        raise ValueError(f"not a zip file: {error}") from error


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
