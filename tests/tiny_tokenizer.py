"""A byte-level BPE vocabulary small enough to read, as the metadata of a GGUF file would give it."""

from services.tokenizer.text import TextModel, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(0x100 + moved.index(b)) for b in range(256)]


SPECIAL = ["<s>", "<|im_end|>", "<|im_start|>"]
WORDS = ["he", "ll", "hell", "hello", "Ġhello", "12", "123"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]
USER = ["<tool>"]
LAST = ["[PAD]"]


def tiny_metadata(**changes: object) -> dict[str, object]:
    """Keys are given without their `tokenizer.ggml.` prefix; None removes one."""
    tokens = (*SPECIAL, *byte_alphabet(), *WORDS, *USER, *LAST)
    types = (
        *(CONTROL for _ in SPECIAL),
        *(NORMAL for _ in range(256 + len(WORDS))),
        *(USER_DEFINED for _ in USER),
        *(UNUSED for _ in LAST),
    )
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": tuple(MERGES),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    values |= changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def tiny_model(**changes: object) -> TextModel:
    return load_tokenizer(tiny_metadata(**changes))
