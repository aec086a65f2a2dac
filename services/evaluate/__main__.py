"""`tercet eval perplexity`: measures through the code that serves: the same runner, back end and pages.

Thin: arguments, files, the runner, and lines on the terminal.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from executor.loading.gguf import open_gguf
from executor.loading.load import load_runner
from executor.models.table import read_model_config
from kernels.cpu.build import BuildError
from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, resolve
from services.config import ACTIVATIONS, BACKENDS, WEIGHTS
from services.evaluate.perplexity import Perplexity, measure
from services.tokenizer.text import load_tokenizer
from services.tokenizer.vocabulary import read_vocabulary

BLOCK_SIZE = 16
LOGIT_ROWS = 64  # at a time


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet eval", allow_abbrev=False)
    measures = parser.add_subparsers(dest="measure", required=True)
    perplexity = measures.add_parser("perplexity", help="of a text, scored as llama.cpp does", allow_abbrev=False)
    perplexity.add_argument("--model", default=DEFAULT_MODEL, help="a name of the catalogue, or a GGUF file")
    perplexity.add_argument("--backend", choices=BACKENDS, default="cpu")
    perplexity.add_argument("--weights", choices=WEIGHTS, default="native")
    perplexity.add_argument("--activations", choices=ACTIVATIONS, default="16bit")
    perplexity.add_argument("--file", type=Path, required=True, help="UTF-8 text")
    perplexity.add_argument("--bytes", type=_positive, help="of the file, from its beginning; default all")
    perplexity.add_argument("--context", type=_positive, default=512, help="tokens of a window; default 512")
    perplexity.add_argument("--threads", type=_positive, help="of the back end; default torch's own choice")
    perplexity.add_argument("--json", action="store_true", help="print one JSON line instead of the result in words")
    chosen = parser.parse_args(argv)
    started = time.monotonic()
    try:
        result = _perplexity(chosen)
    except (CatalogueError, ValueError, OSError, BuildError) as error:
        print(f"tercet eval: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    if chosen.json:
        print(
            json.dumps(
                asdict(result)
                | {
                    "backend": chosen.backend,
                    "weights": chosen.weights,
                    "activations": chosen.activations,
                    "seconds": round(seconds, 1),
                }
            )
        )
    else:
        print(
            f"perplexity {result.value:.4f} ± {result.standard_error:.4f} over {result.scored_tokens} tokens "
            f"in {result.windows} windows of {chosen.context}, back end {chosen.backend}, "
            f"weights {chosen.weights}, activations {chosen.activations}, {seconds:.1f} s"
        )
    return 0


def read_text(path: Path, limit: int | None) -> str:
    """The file's first bytes; a character that the limit cuts is left out. Raises OSError, ValueError."""
    with path.open("rb") as stream:
        data = stream.read() if limit is None else stream.read(limit)
        cut = stream.read(1) != b""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut and error.end == len(data) and error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8")
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from error


def _perplexity(chosen: argparse.Namespace) -> Perplexity:
    path = resolve(chosen.model, cache_directory(os.environ)).path
    text = read_text(chosen.file, chosen.bytes)
    with open_gguf(path) as file:
        vocabulary = read_vocabulary(file.metadata)
        token_ids = load_tokenizer(file.metadata).encode(text, add_special=True)
        longest = read_model_config(file.metadata).context_length
    if chosen.context > longest:
        raise ValueError(f"--context is {chosen.context}, the model's context is {longest}")
    runner = load_runner(
        path,
        backend=chosen.backend,
        scheme=chosen.weights,
        activations=chosen.activations,
        block_size=BLOCK_SIZE,
        total_blocks=-(-chosen.context // BLOCK_SIZE),
        max_batched_tokens=chosen.context,
        max_sequences=LOGIT_ROWS,
        max_model_len=chosen.context,
        threads=chosen.threads,
        kernel_cache=cache_directory(os.environ) / "kernels",
    )
    wanted = len(token_ids) // chosen.context

    def report(done: int, value: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{wanted} windows, perplexity {value:.4f}", end="", file=sys.stderr, flush=True)

    bos_id = vocabulary.bos_id if vocabulary.add_bos else None
    result = measure(runner.score, token_ids, chosen.context, bos_id, report)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return result


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
