"""`tercet plan`: what a model would take of a device, how many sequences fit, and how fast it could be at best."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from executor.loading.gguf import GgufError
from executor.sizing.devices import DEVICES, GIB, PlanError, find_device
from executor.sizing.files import SizedModel, read_shape
from executor.sizing.formats import CACHE_FORMATS, WEIGHT_FORMATS, find_cache, find_weights
from executor.sizing.plan import Ask, Ceiling, Plan, make_plan
from executor.sizing.shapes import SHAPES
from services.catalogue import MODELS, CatalogueError, cache_directory, resolve

FILE = "file"  # --weights: as the model's file has them


def main(argv: Sequence[str]) -> int:
    chosen = _parse(argv)
    try:
        ask = _ask(chosen)
        plan = make_plan(ask)
    except (PlanError, GgufError, CatalogueError, OSError) as error:
        print(f"tercet plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_document(ask, plan, chosen), indent=1) if chosen.json else _page(ask, plan, chosen))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tercet plan",
        allow_abbrev=False,
        description="What a model would take of a device, and its ceilings.",
        epilog=f"Shapes known by name: {', '.join(SHAPES)}.",
    )
    parser.add_argument("--model", required=True, help="a shape's name, a GGUF, or a directory with config.json")
    parser.add_argument("--device", default="h200", choices=tuple(DEVICES))
    parser.add_argument("--weights", choices=(FILE, *WEIGHT_FORMATS), help="default: as the file has them, else bf16")
    parser.add_argument("--kv", default="bf16", choices=tuple(CACHE_FORMATS), help="format of the cache")
    parser.add_argument("--context", type=int, help="tokens of a sequence; default: the model's, 8192 at most")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-sequences", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--memory-gib", type=float, help="of the device, in place of the table's")
    parser.add_argument("--reserve-gib", type=float, help="left to the device's context and code; default: 4 %%")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _ask(chosen: argparse.Namespace) -> Ask:
    model = _model(chosen.model)
    if chosen.weights == FILE and model.weights is None:
        raise PlanError(f"--weights {FILE} needs a model file; {chosen.model} is a shape alone")
    stored = model.weights if chosen.weights in (None, FILE) else None
    device = find_device(chosen.device)
    if chosen.memory_gib is not None:
        if not 0 < chosen.memory_gib < 1 << 20:
            raise PlanError(f"--memory-gib must be above 0, got {chosen.memory_gib}")
        device = dataclasses.replace(device, memory=int(chosen.memory_gib * GIB))
    return Ask(
        shape=model.shape,
        device=device,
        weights=stored if stored is not None else find_weights(chosen.weights or "bf16"),
        cache=find_cache(chosen.kv),
        context=chosen.context if chosen.context is not None else min(8192, model.shape.context),
        block_size=chosen.block_size,
        max_sequences=chosen.max_sequences,
        max_batched_tokens=chosen.max_batched_tokens,
        reserve=None if chosen.reserve_gib is None else int(chosen.reserve_gib * GIB),
    )


def _model(name: str) -> SizedModel:
    if name in SHAPES and name not in MODELS:
        return SizedModel(SHAPES[name])
    try:
        return read_shape(Path(name) if os.path.isdir(name) else resolve(name, cache_directory(os.environ)).path)
    except CatalogueError:
        if name in SHAPES:  # of the catalogue, and not pulled
            return SizedModel(SHAPES[name])
        raise


def _document(ask: Ask, plan: Plan, chosen: argparse.Namespace) -> dict[str, object]:
    device = dataclasses.asdict(dataclasses.replace(ask.device, operations=dict(ask.device.operations)))
    return {
        "model": dataclasses.asdict(ask.shape),
        "device": device,
        "weights": ask.weights.name,
        "kv": chosen.kv,
        "context": ask.context,
        **dataclasses.asdict(plan),
    }


def _page(ask: Ask, plan: Plan, chosen: argparse.Namespace) -> str:
    device, lines = ask.device, [f"{ask.shape.name} on {ask.device.name}: weights {ask.weights.name}, KV {chosen.kv}"]
    origin = device.origin
    rate = ask.weights.operand if ask.weights.operand in device.operations else "bf16"
    lines += [
        "",
        f"bandwidth {device.bandwidth / 1e12:.3f} TB/s ({origin('bandwidth')}), "
        f"products {device.rate(rate) / 1e12:.4g} Tflop/s in {rate} ({origin(rate)})",
        "",
        *_table(
            ("memory", "GiB"), [(each.name, f"{each.bytes / GIB:.2f}") for each in plan.table.lines]
            + [("all", f"{plan.table.total / GIB:.2f}"), ("there is", f"{device.memory / GIB:.2f}")],
        ),
        "",
        f"a token takes {plan.token_bytes:,} bytes; {plan.blocks:,} blocks of {ask.block_size} hold "
        f"{plan.pool_tokens:,} tokens",
        "",
        *_table(
            ("tokens of a sequence", "sequences at once"),
            [(f"{each.tokens:,}", f"{each.sequences:,}") for each in plan.concurrency],
        ),
        "",
        f"ceilings; decode at {ask.context:,} tokens of context",
        "",
        *_table(
            ("step", "GB read", "Gop", "ms at least", "tokens/s at most", "bound", "fits"),
            [_ceiling(f"decode, batch {each.sequences}", each) for each in plan.decode]
            + [_ceiling(f"prefill of {each.tokens:,}", each) for each in plan.prefill],
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _ceiling(name: str, one: Ceiling) -> tuple[str, ...]:
    return (
        name,
        f"{one.bytes / 1e9:.2f}",
        f"{one.operations / 1e9:,.0f}",
        f"{one.seconds * 1e3:.3f}",
        f"{one.tokens_per_second:,.0f}",
        one.bound,
        "yes" if one.fits else "no",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    sides: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(head) - 1)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(side(text, width) for side, text, width in zip(sides, row, widths, strict=True)).rstrip()

    return [line(head), *(line(row) for row in rows)]
