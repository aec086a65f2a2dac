"""What the compiler makes of every GPU kernel: registers, spills, shared memory, instructions. Needs no GPU.

python benchmarks/kernel_report.py [--arch 90 ...] [--json FILE]
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from kernels.gpu.compiled import SHARED_LIMIT, Compiled, inspect
from kernels.gpu.launches import cases


def line(name: str, found: Compiled) -> str:
    tensor = ", ".join(f"{count} {kind}" for kind, count in found.tensor.items()) or "-"
    figures = (found.registers, found.spills, found.shared, found.programs * found.warps, tensor, found.wide)
    return f"| {name} | " + " | ".join(str(each) for each in (*figures, found.narrow, found.asynchronous)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", choices=list(SHARED_LIMIT), default=list(SHARED_LIMIT))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    everything = []
    for arch in chosen.arch:
        print(f"\n### sm_{arch}\n")
        print("| kernel | registers | spilled bytes | shared bytes | warps resident | tensor instructions |", end="")
        print(" 16-byte loads | shorter loads | asynchronous copies |")
        print("|---|---|---|---|---|---|---|---|---|")
        for case in {case.name: case for case in cases(arch)}.values():
            found = inspect(case.launch, arch)
            print(line(case.name, found), flush=True)
            plain = {each.name: getattr(found, each.name) for each in fields(found)} | {"tensor": dict(found.tensor)}
            everything.append({"kernel": case.name, "bound": case.bound, **plain})
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
