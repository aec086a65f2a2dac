"""What a decision costs: `plan` and `apply` of the scheduler's core, by how many run and how many wait.

    python benchmarks/scheduler_core.py [--policy fcfs] [--steps 200]

Steady decode with a full queue: every step, some end and as many come in. Prints a table and the fit
time = a + b * running + c * log2(waiting). CPU time of the one thread, so that a busy machine does not spoil it;
garbage collection as it is by default.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits, SequenceOutcome, StepOutcome, Submission
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.policies.policy import POLICIES

RUNNING = (64, 256, 1024)
WAITING = (1_000, 10_000, 100_000)
OUTPUT = 200  # tokens of an answer: of 256 that run, about one ends in each step


def measure(policy: str, running: int, waiting: int, steps: int) -> list[float]:
    """Milliseconds of plan + apply, of each step."""
    core = SchedulerCore(
        CoreConfig(policy, max_queued_requests=2 * (waiting + running), max_queued_tokens=1 << 40, aging_ns=10**12)
    )
    spec = LaneSpec(
        block_size=16,
        total_blocks=running * 40,
        max_batched_tokens=running + 512,
        max_sequences=running,
        max_model_len=8192,
    )
    core.attach("lane", spec, 0)
    number = 0

    def submit(now: int) -> None:
        nonlocal number
        # Lengths that differ, so that not all end together.
        output = OUTPUT // 2 + number * 7919 % OUTPUT
        limits = Limits(10**15, 10**15, 10**15, 10**15)
        core.submit(Submission(f"r{number}", f"tenant{number % 16}", 32 + number % 64, output, limits), now)
        number += 1

    for _ in range(waiting + running):
        submit(0)
    times = []
    now = 0
    warm = 2 * running // 8 + OUTPUT
    for step in range(warm + steps):
        now += 10_000_000
        while core.load().waiting < waiting:
            submit(now)
        begun = time.thread_time_ns()
        plan = core.plan("lane", now)
        planned = time.thread_time_ns()
        assert plan is not None
        outcomes = tuple(SequenceOutcome(piece.slot, 1) for piece in plan.slices if piece.samples)
        outcome = StepOutcome(plan.step_id, outcomes)
        applying = time.thread_time_ns()
        core.apply("lane", outcome, now)
        if step >= warm:
            times.append((time.thread_time_ns() - applying + planned - begun) / 1e6)
    return times


def fit(rows: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """a, b, c of time = a + b * running + c * log2(waiting), least squares over relative errors."""
    matrix = np.array([[1.0, running, math.log2(waiting)] for running, waiting, _ in rows])
    medians = np.array([median for _, _, median in rows])
    solution, *_ = np.linalg.lstsq(matrix / medians[:, None], np.ones(len(rows)), rcond=None)
    return tuple(float(value) for value in solution)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fcfs")
    parser.add_argument("--steps", type=int, default=200, help="steps measured")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING)
    options = parser.parse_args()
    print(f"policy {options.policy}, {options.steps} steps each, plan + apply in ms")
    print(f"{'running':>8} {'waiting':>8} {'median':>8} {'p95':>8} {'max':>8}")
    rows = []
    for running in options.running:
        for waiting in options.waiting:
            times = measure(options.policy, running, waiting, options.steps)
            median = statistics.median(times)
            rows.append((running, waiting, median))
            p95 = statistics.quantiles(times, n=20)[-1]
            print(f"{running:>8} {waiting:>8} {median:>8.3f} {p95:>8.3f} {max(times):>8.3f}", flush=True)
    if len(rows) >= 3:
        a, b, c = fit(rows)
        print(f"fit: {a:.4f} + {b:.6f} * running + {c:.4f} * log2(waiting) ms")


if __name__ == "__main__":
    main()
