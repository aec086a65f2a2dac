"""Steps in flight on the executors of a run, and what they draw: tokens of no meaning, as many as the load says."""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.core.calls import Plan, SequenceKey, SequenceOutcome
from services.simulate.cost import CostModel, StepWork, chunk_context
from services.simulate.records import NEVER
from services.simulate.stretch import Stretch

Row = tuple[int, SequenceKey, int]  # slot, key, position that the draw gets


@dataclass(slots=True, eq=False)
class Live:
    """A request between its submission and its end."""

    number: int
    prompt_len: int
    output_len: int
    told: bool  # max_tokens ends it, not a stop id
    tenant: str
    reached: int = 0  # prompt tokens up to here were counted as service of its tenant

    def draws_left(self, row: Row) -> int:
        """Steps, the one of `row` first, whose draw is not its last."""
        return self.output_len - (row[2] - self.prompt_len + 1)


@dataclass(slots=True)
class Step:
    """In flight."""

    step_id: int
    rows: list[Row]
    work: StepWork

    def go_on(self, steps: int) -> None:
        """It becomes the step that comes so many quiet ones later."""
        self.step_id += steps
        self.rows = [(slot, key, position + steps) for slot, key, position in self.rows]
        self.work = StepWork(0, self.work.decode_rows, 0, self.work.decode_context + steps * len(self.rows))


@dataclass(slots=True)
class Executor:
    lane: str
    cost: CostModel
    steps: deque[Step] = field(default_factory=deque)  # the first executes
    stretch: Stretch | None = None  # quiet steps that it goes over
    ends_at: int = NEVER  # the step that executes; during a stretch: that it began with
    hungry: bool = True  # its pipeline has room
    busy_ns: int = 0


def step_of(plan: Plan) -> Step:
    prefill = rows = prefill_context = decode_context = 0
    drawn = []
    for piece in plan.slices:
        reach = piece.start + piece.count
        if piece.count == 1:
            rows += 1
            decode_context += reach
        else:
            prefill += piece.count
            prefill_context += chunk_context(piece.start, piece.count)
        if piece.samples:
            drawn.append((piece.slot, piece.key, reach))
    return Step(plan.step_id, drawn, StepWork(prefill, rows + plan.padding, prefill_context, decode_context))


def draw(row: Row, live: Live | None) -> SequenceOutcome:
    """live: None where it ended before."""
    ended = live is not None and not live.told and live.draws_left(row) <= 0
    return SequenceOutcome(row[0], 1, ended=ended)
