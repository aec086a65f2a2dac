"""A model's text side, read from its file."""

import os
from dataclasses import dataclass

from executor.loading.gguf import GgufError, open_gguf
from services.catalogue import CatalogueError, cache_directory, resolve
from services.process import StartError
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.templates import ChatTemplate, load_chat_template
from services.tokenizer.text import TextModel, load_tokenizer


@dataclass(frozen=True, slots=True)
class LoadedText:
    """context_length: tokens that the model was made for; None: its file does not say."""

    name: str
    model: TextModel
    template: ChatTemplate | None
    context_length: int | None


def load_text(source: str) -> LoadedText:
    """source: a name of the catalogue, or a GGUF file. Raises StartError."""
    try:
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
