"""A model's text side, read from its file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executor.loading.gguf import GgufError, open_gguf
from services.catalogue import MODELS, CatalogueError, cache_directory, resolve
from services.process import StartError
from services.tokenizer.engines import encode_in_the_callers_thread
from services.tokenizer.huggingface import read_directory
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.templates import ChatTemplate, load_chat_template, make_chat_template
from services.tokenizer.text import TextModel, load_tokenizer

DIRECTORY_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
MAX_FILE_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedText:
    """context_length: tokens that the model was made for; None: its file does not say."""

    name: str
    model: TextModel
    template: ChatTemplate | None
    context_length: int | None


def load_text(source: str) -> LoadedText:
    """source: a name of the catalogue, a GGUF file, or a directory with `tokenizer.json`. Raises StartError."""
    encode_in_the_callers_thread()
    try:
        if source not in MODELS and os.path.isdir(source):
            return _load_directory(Path(source))
        resolved = resolve(source, cache_directory(os.environ))
        with open_gguf(resolved.path) as file:
            model = load_tokenizer(file.metadata)
            length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
            return LoadedText(
                resolved.name,
                model,
                load_chat_template(file.metadata, model),
                length if isinstance(length, int) else None,
            )
    except (CatalogueError, GgufError, InvalidTokenizer, OSError) as error:
        raise StartError(f"model {source}: {error}") from error


def _load_directory(directory: Path) -> LoadedText:
    files = {}
    for name in DIRECTORY_FILES:
        path = directory / name
        if path.is_file():
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidTokenizer(name, f"has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES}")
            files[name] = path.read_bytes()
    found = read_directory(files)
    model = TextModel(found.vocabulary)
    template = None if found.template is None else make_chat_template(found.template, model)
    return LoadedText(directory.resolve().name, model, template, found.context_length)
