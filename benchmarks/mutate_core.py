"""Do the tests of the scheduler's core notice faults? Each deliberate one-line fault is put into a copy, and must be
caught.

    python benchmarks/mutate_core.py [NAME ...]

A fault is caught when the tests of the core fail, or the state machine finds a counterexample (without shrinking it).
Exits with 1 where one survives. Takes a few minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = (
    *("test_blocks", "test_deadlines", "test_core", "test_core_lanes", "test_core_pathologies"),
    *(
        "test_policies",
        "test_gives_way",
        "test_admission",
        "test_session_leases",
        "test_prefix_cache",
        "test_prefix_core",
    ),
)
LAST: Final = ("test_fair_windows",)
MACHINE: Final = """
import sys
sys.path[:0] = ["tests", "tests/services/scheduler"]
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_core_properties import CoreMachine
run_state_machine_as_test(
    CoreMachine,
    settings=settings(
        max_examples=300, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    ),
)
"""
LIMIT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Fault:
    """In `file` of services/scheduler, `line` occurs once and becomes `wrong`."""

    name: str
    file: str
    line: str
    wrong: str


FAULTS: Final = (
    Fault("no-fence", "core/blocks.py", "if self._last_use[block] <= self._applied:", "if True:"),
    Fault(
        "admits-after-preempting",
        "core/planning.py",
        "if not self._preempted and not self._benched and not self._short:",
        "if not self._benched and not self._short:",
    ),
    Fault(
        "no-cool-down",
        "core/planning.py",
        "self._lane.cool_until = plan.step_id + 1 + self._moment.config.preemption_cooldown",
        "self._lane.cool_until = 0",
    ),
    Fault(
        "takes-from-itself",
        "core/planning.py",
        "if not victims or victims[-1].placed().rank <= sequence.placed().rank:",
        "if not victims:",
    ),
    Fault(
        "preempts-equals",
        "core/claims.py",
        "            if placement.rank[0] > claim(head):",
        "            if placement.rank[0] >= claim(head):",
    ),
    Fault(
        "preempts-in-flight", "core/planning.py", "if self._lane.busy(victim):", "if False and self._lane.busy(victim):"
    ),
    Fault(
        "no-watermark",
        "core/forecast.py",
        "available = lane.pool.total - self._kept_free",
        "available = lane.pool.total",
    ),
    Fault(
        "peak-forgets-growth",
        "core/admission.py",
        "peak = max(peak, left * (index + 1) + held)",
        "peak = max(peak, held)",
    ),
    Fault(
        "draws-beyond-the-limit",
        "core/sequence.py",
        "return (length if length < limit else limit - 1) - placement.computed",
        "return length - placement.computed",
    ),
    Fault("prompt-charged-for-each-answer", "core/gate.py", "(one.prompt_len if place else 0)", "0"),
    Fault("pending-not-counted", "core/core.py", "drawn_in_flight = sequence.placement.pending", "drawn_in_flight = 0"),
    Fault(
        "queue-tokens-leak",
        "core/policies/queue.py",
        "self.tokens -= sequence.known",
        "self.tokens -= sequence.submission.prompt_len",
    ),
    Fault(
        "deadline-of-the-last-token",
        "core/core.py",
        "elif first:",
        "elif False:",
    ),
    Fault(
        "expired-get-slices",
        "core/moment.py",
        "return self.some_passed and self.deadlines.passed(sequence.key, self.now)",
        "return False",
    ),
    Fault(
        "recompute-is-charged",
        "core/sequence.py",
        "due = min(end, given) - max(start, self.paid)",
        "due = min(end, given) - start",
    ),
    Fault(
        "idle-time-earns-credit",
        "core/policies/fair.py",
        "max(self.served(tenant), least -",
        "max(self.served(tenant), 0 * least -",
    ),
    Fault("passes-are-not-bounded", "core/joining.py", "other.passed += 1", "other.passed += 0"),
    Fault("nobody-ages", "core/policies/queue.py", "sequence.aged += 1", "sequence.aged += 0"),
    Fault(
        "quota-is-not-refunded",
        "core/quota.py",
        "account.tokens.give_back(charged - used, now)",
        "account.tokens.give_back(0, now)",
    ),
    Fault("rungs-flap", "core/degrade.py", "if pressure > config.leave_at:", "if pressure >= config.enter_at:"),
    Fault("cap-is-ignored", "core/moment.py", "sequence.preemptions >= self.config.preemption_cap > 0", "False"),
    Fault("slot-is-leaked", "core/lane.py", "heappush(self.free_slots, placement.slot)", "pass"),
    Fault(
        "prompts-get-no-share",
        "core/lane.py",
        "max(1, spec.max_batched_tokens - self.prefill_minimum)",
        "max(1, spec.max_batched_tokens)",
    ),
    # Fairness over windows.
    Fault(
        "a-flood-ages-past-others",
        "core/policies/queue.py",
        "return 0 if policy.base is None else policy.base(sequence), sequence.submission.tenant",
        "return class_of(policy, sequence), sequence.submission.tenant",
    ),
    Fault("nobody-gives-way", "core/claims.py", "if counter > most:", "if False:"),
    Fault("equals-change-places", "core/claims.py", "max(1, self._moment.lane.slots // LAG)", "0"),
    Fault(
        "prompts-take-turns", "core/claims.py", "+ self._prompt(head, cached) + self._lag(head)", "+ self._lag(head)"
    ),
    Fault("recomputing-is-free", "core/claims.py", "counter -= self._lost(sequence)", "pass"),
    Fault("deposits-are-kept", "core/policies/queue.py", "sequence.deposit = 0", "pass"),
    Fault("deposits-are-whole", "core/policies/fair.py", ", self._weighed(tenant, 0, soon))", ", 1 << 200)"),
    # Shortest, in mid-prompt.
    Fault(
        "long-prompts-keep-the-share",
        "core/planning.py",
        "self._shorter is None or want <= self._shorter",
        "True or want <= self._shorter",
    ),
    Fault(
        "gives-way-for-ever",
        "core/planning.py",
        "return moment.now - sequence.submitted_at < AGING_RUNGS * moment.config.aging_ns",
        "return True",
    ),
    # The cache.
    Fault(
        "found-before-it-is-written",
        "core/lane.py",
        "min(placement.confirmed // self.spec.block_size, len(keys))",
        "min(placement.computed // self.spec.block_size, len(keys))",
    ),
    Fault(
        "last-block-is-found-too",
        "core/lane.py",
        "self.cache.find(self.keys(sequence), (sequence.known - 1)",
        "self.cache.find(self.keys(sequence), sequence.known",
    ),
    Fault(
        "found-behind-a-gap",
        "core/prefix.py",
        "            if block is None:\n                break",
        "            if block is None:\n                continue",
    ),
    Fault(
        "reclaimed-blocks-keep-their-key",
        "core/prefix.py",
        "del self._block_of[key], self._tenant_of[block]",
        "del self._tenant_of[block]",
    ),
    Fault(
        "everybody-is-a-session",
        "core/sequence.py",
        "return 3 * (self.cached or 0) >=",
        "return 3 + (self.cached or 0) >= 0 *",
    ),
    Fault("leases-never-shrink", "core/limits.py", "max(0.0, (1 - pressure) / (1 - self.full_below))", "1.0"),
    Fault("leases-never-end", "core/prefix.py", "self._idle.expire(block)\n", "break\n"),
    Fault(
        "leases-stop-work",
        "core/prefix.py",
        "return self.pool.free + self.pool.cached\n",
        "return self.pool.free + self._loose\n",
    ),
    Fault(
        "pinned-go-before-leased",
        "core/reclaim.py",
        "yield from leased\n        yield from pinned",
        "yield from pinned\n        yield from leased",
    ),
    # Results.
    Fault("results-are-taken-twice", "core/core.py", "1 <= outcome.step_id <= at.applied", "False"),
    Fault(
        "a-deadline-never-moves-on",
        "core/deadlines.py",
        "if deadline is not None and deadline[0] <= now:",
        "if deadline is not None:",
    ),
)


def broken(text: str, fault: Fault) -> str:
    """The file's text with the fault in it. Raises ValueError unless its line occurs exactly once."""
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.name}: {fault.line!r} occurs {text.count(fault.line)} times in {fault.file}")
    return text.replace(fault.line, fault.wrong)


def run(command: Sequence[str], folder: Path) -> tuple[bool, str]:
    """Whether it went well, and the last lines that it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT_S} s"
    return done.returncode == 0, done.stdout + done.stderr


def failing(folder: Path, names: Sequence[str]) -> str | None:
    """The first test that fails in this copy; None where all pass."""
    files = [f"tests/services/scheduler/{name}.py" for name in names]
    well, said = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files], folder)
    if well:
        return None
    failed = [line.split()[1].rpartition("/")[2] for line in said.splitlines() if line.startswith(("FAILED", "ERROR "))]
    return failed[0] if failed else said.strip().splitlines()[-1]


def caught_by(folder: Path) -> str | None:
    """What notices a fault in this copy: tests of one rule each, the state machine, the windows of service."""
    if (failed := failing(folder, TESTS)) is not None:
        return failed
    well, said = run([sys.executable, "-c", MACHINE], folder)
    if not well:
        errors = [line for line in said.splitlines() if "Error" in line]
        return f"state machine: {errors[0].strip() if errors else said.strip().splitlines()[-1]}"
    return failing(folder, LAST)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; all without")
    names = parser.parse_args().names
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("services", "executor", "kernels", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        clean = caught_by(copy)
        if clean is not None:
            print(f"without any fault: {clean}")
            return 1
        for fault in faults:
            file = copy / "services" / "scheduler" / fault.file
            right = file.read_text()
            file.write_text(broken(right, fault))
            begun = time.monotonic()
            by = caught_by(copy)
            file.write_text(right)
            survivors += by is None
            print(f"{fault.name:32} {time.monotonic() - begun:6.1f} s  {by or 'SURVIVED'}", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
