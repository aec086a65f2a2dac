"""A small vocabulary for every tokenizer family, with ids by other implementations (`golden/make_family_golden.py`)."""

import json
from functools import cache
from pathlib import Path

from services.tokenizer.text import TextModel, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "services/tokenizer/golden_families.json").read_text(encoding="utf-8"))
NORMAL = 1


def metadata_of(family: str) -> dict[str, object]:
    model = family if family in ("llama", "t5") else "gpt2"
    raw = GOLDEN[model if model != "gpt2" else "byte_level"]
    values: dict[str, object] = {name: tuple(value) for name, value in raw.items() if name != "types"}
    values |= {"model": model, "bos_token_id": 1, "eos_token_id": 2}
    if model == "gpt2":
        values |= {"pre": family, "token_type": (NORMAL,) * len(raw["tokens"])}
    else:
        values |= {"token_type": tuple(raw["types"]), "add_space_prefix": True, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@cache
def model_of(family: str) -> TextModel:
    return load_tokenizer(metadata_of(family))


FAMILIES = sorted({who.split(":")[0] for row in GOLDEN["rows"] for group in row["ids"] for who in group.split(",")})
