"""What `against_peers.py` keeps of a comparison, and the tables that it makes of it."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from services.bench.machine import environment

ROOT: Final = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- against-peers:begin -->", "<!-- against-peers:end -->"
OURS: Final = "tercet"
ENGINE: Final = "tercet-engine"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to keep weights and activations. system: as figures name it."""

    system: str
    name: str
    weights: str
    activations: str


MODES: Final = (
    Mode("tercet-8bit", "weights as in the file, 8-bit activations", "native", "8bit"),
    Mode("tercet-int8", "int8 weights, 16-bit activations", "int8", "16bit"),
    Mode("tercet-int8-8bit", "int8 weights, 8-bit activations", "int8", "8bit"),
    Mode("tercet-bf16", "bf16 weights", "bf16", "16bit"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. part: of PARTS."""

    round: int
    part: str
    system: str
    name: str
    value: float


@dataclass
class State:
    """What is measured so far. done: keys of whole measurements. settings: what must not change within a run."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    done: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def read_state(path: Path, settings: dict[str, Any]) -> State:
    """A new one where there is no file. Ends where the file is of other settings."""
    if not path.exists():
        return State(settings, asdict(environment()))
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        raise SystemExit(f"{path} is of another run: {found['settings']}; --fresh begins anew")
    return State(settings, found["environment"], found["done"], [Figure(**one) for one in found["figures"]])


@dataclass(frozen=True, slots=True)
class Group:
    """One table. parts: where its figures come from."""

    title: str
    parts: tuple[str, ...]


GROUPS: Final = (
    Group("Engine alone, tokens a second", ("engine", "prefill", "perplexity")),
    Group("Served over HTTP, 256 in and 128 out", ("served",)),
    Group("Tercet's own modes, engine alone, tokens a second", ("modes",)),
)
NAMES: Final = {
    OURS: "**Tercet**",
    ENGINE: "Tercet's engine alone, the same load",
    **{mode.system: mode.name for mode in MODES},
    "llama": "llama.cpp, the same file",
    "llama-q8": "llama.cpp, Q8_0",
    "llama-q40": "llama.cpp, Q4_0",
    "vllm-bf16": "vLLM, bf16",
    "vllm": "vLLM, bf16",
}


def table(figures: Sequence[Figure], group: Group) -> list[str]:
    """Medians over the rounds, and in brackets how many times as good ours is: median and range over rounds."""
    mine = [one for one in figures if one.part in group.parts]
    if not mine:
        return []
    columns = list(dict.fromkeys(one.name for part in group.parts for one in mine if one.part == part))
    systems = sorted({one.system for one in mine}, key=lambda system: list(NAMES).index(system))
    rows = [f"**{group.title}**", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for system in systems:
        cells = [cell(mine, system, column) for column in columns]
        rows.append(f"| {NAMES[system]} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def cell(figures: Sequence[Figure], system: str, name: str) -> str:
    theirs = {one.round: one.value for one in figures if (one.system, one.name) == (system, name)}
    if not theirs:
        return "-"
    shown = f"{statistics.median(theirs.values()):.4g}"
    ours = {one.round: one.value for one in figures if (one.system, one.name) == (OURS, name)}
    both = sorted(theirs.keys() & ours.keys())
    if system == OURS or not both or name == "perplexity":
        return shown
    smaller_is_better = name.endswith("ms")
    ratios = [theirs[at] / ours[at] if smaller_is_better else ours[at] / theirs[at] for at in both]
    spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{shown} ({statistics.median(ratios):.2f}x{spread})"


def report(state: State, command: str) -> str:
    rounds = 1 + max((one.round for one in state.figures), default=-1)
    where = state.environment
    head = [
        f"{where['cpu']}, {where['cores']} cores, {where['when'][:10]}, commit {commit()}; load "
        f"{where['load_average']} before; {rounds} rounds. `{command}`",
        "",
        "In brackets: how many times as good Tercet is, the median of the rounds' ratios and their range.",
        "",
    ]
    return "\n".join([*head, *(line for group in GROUPS for line in table(state.figures, group))])


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or "unknown"


def put(path: Path, text: str) -> None:
    """Between the markers. Raises ValueError where they are missing."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text.rstrip()}\n\n{END}{after}", encoding="utf-8")
