"""Our token ids against those of llama.cpp, for one model file.

`python benchmarks/ids_against_llama.py --server URL [MODEL]`. URL is of a `llama-server` that serves the same file
(`llama-server -m FILE --port 8089`); its `/tokenize` answers. MODEL is a name or a file as `--model` takes it. Texts
are the golden ones of the tests, this repository's own sources and documents, and random ones: each of a few alphabets
that tokenizers stumble over. Each twice: control tokens as text, and parsed. A text with bytes that the vocabulary
lacks is refused here, and counted as that. Ends with 1 where the ids of any differ.
"""

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from services.catalogue import DEFAULT_MODEL
from services.tokenizer.invalid import InvalidText
from services.tokenizer.loading import load_text
from services.tokenizer.text import TextModel

ROOT: Final = Path(__file__).parents[1]
GOLDEN: Final = ("golden_smollm2.json", "golden_families.json")
SOURCES: Final = ("**/*.py", "docs/*.md", "protos/**/*.proto", "clients/node/**/*.ts")
ALPHABETS: Final = {
    "ascii": [chr(code) for code in range(128)],
    "code": [*"    \t\n(){}[]<>=+-*/%!&|^~.,:;'\"_#", "if", "self", "return", "0", "1", "x"],
    "latin": [chr(code) for code in range(0x20, 0x250)],
    "cjk": [chr(code) for code in (*range(0x3040, 0x3100), *range(0x4E00, 0x4F00), *range(0xAC00, 0xAC80), 0x3000)],
    "emoji": [chr(code) for code in (*range(0x1F300, 0x1F650), 0x200D, 0xFE0F, *range(0x1F3FB, 0x1F400))],
    "marks": list("aeiouns ") + [chr(code) for code in (*range(0x300, 0x370), *range(0x900, 0x980))],
    "digits": list("0123456789.,  ")
    + [chr(code) for code in (*range(0x660, 0x66A), *range(0x966, 0x970), 0xBD, 0x2167)],
    "space": list(" \t\n\r\x0b\x0c\x85\xa0a'") + [chr(code) for code in range(0x2000, 0x2010)],
    "control": [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0xAD, 0xFEFF, 0xE000)] + ["a", " "],
    "any": [chr(code) for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000],
}
SHOWN: Final = 10


def texts(model: TextModel, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kind and text."""
    for name in GOLDEN:
        golden = json.loads((ROOT / "tests/services/tokenizer" / name).read_text(encoding="utf-8"))
        for row in golden.get("texts", ()) or golden.get("rows", ()):
            yield "golden", row["text"]
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if not {".venv", "node_modules"} & set(path.parts):
                yield "repository", path.read_text(encoding="utf-8")
    draw = random.Random(seed)
    controls = model.control_tokens
    for kind, alphabet in ALPHABETS.items():
        for _ in range(count):
            yield kind, "".join(draw.choices(alphabet, k=draw.randint(1, 60)))
    for _ in range(count if controls else 0):
        yield "control tokens", "".join(draw.choices((*controls, " ", "a", "\n", "<|"), k=draw.randint(1, 12)))


def theirs(server: str, text: str, *, parse_control: bool) -> list[int]:
    asked = {"content": text, "add_special": False, "parse_special": parse_control}
    request = urllib.request.Request(
        f"{server}/tokenize", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [int(one) for one in json.load(answer)["tokens"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--server", required=True)
    parser.add_argument("--count", type=int, default=500, help="random texts of each kind")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(argv)
    model = load_text(chosen.model).model
    compared: dict[str, list[int]] = {}  # by kind: texts, of which differ, are refused, ids
    shown = 0
    for kind, text in texts(model, chosen.count, chosen.seed):
        row = compared.setdefault(kind, [0, 0, 0, 0])
        row[0] += 1
        for parse_control in (False, True):
            try:
                own = model.encode(text, add_special=False, parse_control=parse_control)
            except InvalidText:
                row[2] += 1
                break
            other = theirs(chosen.server.rstrip("/"), text, parse_control=parse_control)
            row[3] += len(own)
            if own != other:
                row[1] += 1
                shown += 1
                if shown <= SHOWN:
                    print(f"{kind}, control tokens {'parsed' if parse_control else 'as text'}: {text[:200]!r}")
                    print(f"  ours   {own[:40]}\n  theirs {other[:40]}")
    for kind, (number, differ, refused, ids) in compared.items():
        print(f"{kind}: {number} texts, {ids} ids, {differ} differ, {refused} refused")
    number, differing, refused, ids = (sum(row[at] for row in compared.values()) for at in range(4))
    print(json.dumps({"texts": number, "differ": differing, "refused": refused, "ids": ids}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
