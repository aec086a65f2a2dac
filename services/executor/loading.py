"""What an executor process can hold: a model file, or the fake runner in its place.

Owns the way from settings to a `Held`. Must not know gRPC. Invariant: torch is imported by `load_model` alone, in the
thread that calls it; what is returned has completed a step.
"""

import argparse
import hashlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from executor.loading.gguf import open_gguf
from executor.step import Capacity
from services.catalogue import CatalogueError, ResolvedModel, cache_directory, model_hash, resolve
from services.config import ExecutorConfig
from services.description import ModelIdentity
from services.executor.fake import At, BadStep, FakeRunner, Faults
from services.executor.fake_tokens import MODES
from services.executor.worker import HANG_FLOOR_NS, Held
from services.process import StartError
from services.tokenizer.grammar_vocabulary import grammar_vocabulary
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.text import TextModel
from services.tokenizer.vocabulary import Vocabulary, read_vocabulary

FAKE_BLOCKS: Final = 4096
FAKE_MODEL_LEN: Final = 8192
INVENTED_EOS: Final = 2


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """vocab_size: of an invented model; None: the model file tells vocabulary, tokenizer and end ids, its weights are
    not read. script: ids that mode "script" plays for every prompt."""

    mode: str
    vocab_size: int | None = None
    script: tuple[int, ...] = ()
    eos_every: int | None = None
    faults: Faults = field(default_factory=Faults)
    load_s: float = 0.0
    hang_floor_s: float = HANG_FLOOR_NS / 1e9


def split_fake_flags(argv: Sequence[str]) -> tuple[FakeOptions | None, list[str]]:
    """The flags of the fake runner, and all the others. They are no settings: a served process never has them."""
    parser = argparse.ArgumentParser(prog="tercet executor", allow_abbrev=False, add_help=False)
    parser.add_argument("--fake", choices=tuple(MODES))
    parser.add_argument("--fake-vocab-size", type=int)
    parser.add_argument("--fake-script", type=_ids, default=())
    parser.add_argument("--fake-eos-every", type=int)
    parser.add_argument("--fake-delay-s", type=float, default=0.0)
    parser.add_argument("--fake-delay-per-token-s", type=float, default=0.0)
    parser.add_argument("--fake-load-s", type=float, default=0.0)
    parser.add_argument("--fake-hang-floor-s", type=float, default=HANG_FLOOR_NS / 1e9)
    for fault in ("hang", "die", "crash"):
        parser.add_argument(f"--fake-{fault}-at", type=int, metavar="COUNT", help="the how-manieth step run")
    chosen, others = parser.parse_known_args(argv)
    if chosen.fake is None:
        for name, value in vars(chosen).items():
            if value != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} needs --fake")
        return None, others
    faults = Faults(
        hang=_at(chosen.fake_hang_at),
        die=_at(chosen.fake_die_at),
        crash=_at(chosen.fake_crash_at),
        delay_s=chosen.fake_delay_s,
        delay_per_token_s=chosen.fake_delay_per_token_s,
    )
    options = FakeOptions(
        mode=chosen.fake,
        vocab_size=chosen.fake_vocab_size,
        script=chosen.fake_script,
        eos_every=chosen.fake_eos_every,
        faults=faults,
        load_s=chosen.fake_load_s,
        hang_floor_s=chosen.fake_hang_floor_s,
    )
    return options, others


def load_fake(options: FakeOptions, config: ExecutorConfig, environ: Mapping[str, str]) -> Held:
    """Raises StartError."""
    time.sleep(options.load_s)
    if options.vocab_size is None:
        resolved = _resolve(config, environ)
        vocabulary = _read_vocabulary(resolved)
        model = ModelIdentity(
            name=resolved.name,
            model_hash=model_hash(resolved.path),
            tokenizer_hash=vocabulary.fingerprint(),
            max_model_len=config.max_model_len or FAKE_MODEL_LEN,
            vocab_size=len(vocabulary.tokens),
            eos_token_ids=vocabulary.eos_ids,
        )
    else:
        if options.vocab_size <= INVENTED_EOS:
            raise StartError(f"--fake-vocab-size is {options.vocab_size}; it must be above {INVENTED_EOS}")
        model = ModelIdentity(
            name="fake",
            model_hash=hashlib.sha256(f"fake model {options.vocab_size}".encode()).hexdigest(),
            tokenizer_hash=hashlib.sha256(f"fake tokenizer {options.vocab_size}".encode()).hexdigest(),
            max_model_len=config.max_model_len or FAKE_MODEL_LEN,
            vocab_size=options.vocab_size,
            eos_token_ids=(INVENTED_EOS,),
        )
    capacity = Capacity(
        block_size=config.block_size,
        total_blocks=config.total_blocks or FAKE_BLOCKS,
        max_batched_tokens=config.max_batched_tokens,
        max_sequences=config.max_sequences,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )
    runner = FakeRunner(
        options.mode,
        capacity,
        scripts={(): options.script} if options.mode == "script" else {},
        eos_every=options.eos_every,
        faults=options.faults,
        on_die=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    return Held(runner, BadStep, model, "fake")


def load_model(config: ExecutorConfig, environ: Mapping[str, str]) -> Held:
    """Load, check and warm up the model that the settings name. Raises StartError."""
    resolved = _resolve(config, environ)
    vocabulary = _read_vocabulary(resolved)

    # Here and not above: a process with a fake runner does without torch, and a bad setting is told at once.
    from executor.cache import MemoryPlanError
    from executor.loading.load import load_runner
    from executor.loading.shortage import TEMPORARIES, naming, start_table
    from executor.slots import StepError
    from kernels.cpu.build import BuildError

    try:
        runner = load_runner(
            resolved.path,
            backend=config.backend,
            scheme=config.weights,
            activations=config.activations,
            block_size=config.block_size,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            kv_memory_bytes=None if config.total_blocks is not None else config.kv_memory_mib << 20,
            total_blocks=config.total_blocks,
            max_model_len=config.max_model_len,
            threads=config.threads,
            pin_threads=config.pin_threads,
            kv=config.kv,
            kernel_cache=cache_directory(environ) / "kernels",
            model_hash=model_hash(resolved.path),
            grammar_vocabulary=(lambda: grammar_vocabulary(TextModel(vocabulary))) if vocabulary.eos_ids else None,
        )
    except (ValueError, OSError, BuildError, CatalogueError) as error:
        raise StartError(f"model {resolved.name}: {error}") from error
    capacity = runner.capacity
    if len(vocabulary.tokens) > capacity.vocab_size:
        raise StartError(
            f"model {resolved.name}: the tokenizer has {len(vocabulary.tokens)} ids, the weights {capacity.vocab_size}"
        )
    try:
        memory = runner.memory
        with naming(start_table(runner.weight_bytes, memory.temporary_bytes, memory.pool_bytes), TEMPORARIES):
            runner.warm_up()
    except MemoryPlanError as error:
        raise StartError(f"model {resolved.name}: {error}") from error
    model = ModelIdentity(
        name=resolved.name,
        model_hash=runner.model_hash,
        tokenizer_hash=vocabulary.fingerprint(),
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        eos_token_ids=vocabulary.eos_ids,
    )
    return Held(
        runner,
        StepError,
        model,
        runner.backend,
        runner.weight_bytes,
        runner.memory.pool_bytes,
        runner.grammars,
        runner.kv_format,
        runner.late_kernels,
    )


def _resolve(config: ExecutorConfig, environ: Mapping[str, str]) -> ResolvedModel:
    try:
        return resolve(config.model, cache_directory(environ))
    except CatalogueError as error:
        raise StartError(str(error)) from error


def _read_vocabulary(resolved: ResolvedModel) -> Vocabulary:
    try:
        with open_gguf(resolved.path) as file:
            return read_vocabulary(file.metadata)
    except (ValueError, OSError, InvalidTokenizer) as error:
        raise StartError(f"model {resolved.name}: {error}") from error


def _at(count: int | None) -> At | None:
    return None if count is None else At(count=count)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
