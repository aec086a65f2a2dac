"""Bytes and operations of the GPU's kernels and of whole steps, counted from their launches, and the floor.

Needs no GPU.

python benchmarks/roofline.py [--device h200] [--model llama-3.1-8b ...] [--json FILE]
"""

import argparse
import json
from pathlib import Path

from executor.roofline import Rows, StepCost, fewest_bytes, products, step_cost
from executor.sizing.devices import DEVICES
from executor.sizing.formats import find_cache, find_weights
from executor.sizing.shapes import SHAPES

CHOICES = (("bf16", "bf16"), ("w8", "bf16"), ("w4", "bf16"), ("bf16", "fp8"), ("w4", "fp8"))
DECODES = (*(Rows(batch, 1, 1023) for batch in (1, 8, 64, 256)), Rows(64, 1, 8191))
PREFILLS = (Rows(1, 1024, 0), Rows(1, 8192, 0))
ARCH = {"h200": 90, "h100": 90, "a100": 80, "l4": 89, "rtx-4090": 89}
WHAT = "weights | keys and values | written | read again | scratch"


def told(rows: Rows) -> str:
    if rows.tokens > 1:
        return f"prefill of {rows.tokens:,}"
    return f"decode, batch {rows.sequences}, context {rows.before + 1:,}"


def by_kernel(cost: StepCost, device: str) -> list[str]:
    lines = [f"| kernel | times | {WHAT} (MB) | operations (M) | floor (us), all times |", "|---" * 9 + "|"]
    for part in cost.parts:
        one = part.traffic
        moved = (one.weights, one.cache, one.written, one.again, one.scratch)
        lines.append(
            f"| {one.kernel} | {part.times} | "
            + " | ".join(f"{each / 1e6:.3f}" for each in moved)
            + f" | {one.operations / 1e6:,.1f} | {part.times * part.seconds(DEVICES[device]) * 1e6:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200", choices=list(ARCH))
    parser.add_argument("--model", nargs="*", default=["llama-3.1-8b", "llama-3.1-70b"], choices=list(SHAPES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    device, arch = DEVICES[chosen.device], ARCH[chosen.device]
    everything = []
    for name in chosen.model:
        shape = SHAPES[name]
        print(f"\n### {name} on {device.name}\n")
        print("| step | weights | KV | fewest GB | GB by design | ratio | Gop | launches | floor ms | tokens/s |")
        print("|---" * 10 + "|")
        for weights, cache in CHOICES:
            for rows in DECODES + (PREFILLS if (weights, cache) == CHOICES[0] else ()):
                scheme = find_weights(weights)
                cost = step_cost(shape, device, arch, scheme, cache, rows)
                fewest = fewest_bytes(shape, scheme, find_cache(cache), rows)
                seconds = cost.seconds(device)
                speed = rows.sequences * rows.tokens / seconds
                print(
                    f"| {told(rows)} | {weights} | {cache} | {fewest / 1e9:.2f} | {cost.moved / 1e9:.2f} "
                    f"| {cost.moved / fewest:.3f} | {cost.operations / 1e9:,.0f} | {cost.launches} "
                    f"| {seconds * 1e3:.3f} | {speed:,.0f} |"
                )
                everything.append(
                    {
                        "model": name, "step": told(rows), "weights": weights, "kv": cache, "fewest": fewest,
                        "moved": cost.moved, "operations": cost.operations, "seconds": seconds,
                    }
                )  # fmt: skip
        for rows in (Rows(1, 1, 1023), Rows(64, 1, 1023)):
            print(f"\n{told(rows)}, bf16, by kernel:\n")
            print("\n".join(by_kernel(step_cost(shape, device, arch, find_weights("bf16"), "bf16", rows), device.name)))
        print("\nproducts of a layer: bytes by design over the fewest\n")
        names = [each.name for each in shape.matrices()[:4]]
        print(f"| rows | weights | {' | '.join(names)} |\n|---|---" + "|---" * len(names) + "|")
        for count in (1, 8, 16, 64, 256):
            for weights in ("bf16", "w8", "w4"):
                found = products(shape, find_weights(weights), device, arch, count)
                ratios = [f"{part.traffic.moved / part.traffic.fewest:.3f}" for part in found]
                print(f"| {count} | {weights} | {' | '.join(ratios)} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
