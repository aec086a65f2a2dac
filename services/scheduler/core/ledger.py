"""What was counted since the start. Knows numbers; each only grows."""

from collections.abc import Iterable
from dataclasses import fields

from services.scheduler.core.calls import InvariantError, Plan, Reason, Totals
from services.scheduler.core.sequence import Sequence


class Ledger:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {field.name: 0 for field in fields(Totals) if field.name != "finished"}
        self._finished = dict.fromkeys(Reason, 0)

    def count(self, **increments: int) -> None:
        for name, by in increments.items():
            self._counts[name] += by

    def planned(self, plan: Plan, tokens: int, looked_up_tokens: int) -> None:
        """tokens: positions in its slices. looked_up_tokens: positions of those that it admits."""
        self.count(
            steps=1,
            planned_tokens=tokens,
            admissions=len(plan.admitted),
            cached_tokens=sum(admitted.cached_tokens for admitted in plan.admitted),
            looked_up_tokens=looked_up_tokens,
            preemptions=len(plan.preempted),
            recomputed_tokens=sum(preempted.recompute_tokens for preempted in plan.preempted),
        )

    def finished(self, reason: Reason) -> None:
        self._finished[reason] += 1

    def totals(self) -> Totals:
        return Totals(finished=dict(self._finished), **self._counts)

    def check(self, live: Iterable[Sequence]) -> None:
        """Raises InvariantError where requests or tokens do not reconcile with those that live."""
        totals, delivered = self.totals(), [sequence.delivered for sequence in live]
        if totals.sampled != totals.delivered + totals.discarded + sum(delivered):
            raise InvariantError(f"tokens do not reconcile: {totals}, {sum(delivered)} undecided")
        if totals.submitted != sum(totals.finished.values()) + len(delivered):
            raise InvariantError(f"requests do not reconcile: {totals}, {len(delivered)} live")
