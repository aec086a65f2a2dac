"""Between the core's lengths and everybody else's ids: a request measured, a plan filled with what the shell knows, a
result taken apart.

Changes nothing but traces and verdicts of the requests in it.
"""

from collections.abc import Mapping

from executor.step import Slice, SliceResult, Step, StepResult
from services.scheduler import endings
from services.scheduler.core.calls import Plan, SequenceKey, SequenceOutcome, StepOutcome, Submission
from services.scheduler.intake import Admission
from services.scheduler.live import FilledStep, LiveRequest
from services.scheduler.outbox import Drawn
from services.scheduler.prefix_keys import KeyChain

Live = Mapping[SequenceKey, LiveRequest]


def measured(key: SequenceKey, admission: Admission, keys: KeyChain | None) -> Submission:
    """What the core is told of a request. keys: of its blocks; None: it takes no part in the prefix cache."""
    return Submission(
        key=key,
        tenant=admission.caller.tenant,
        prompt_len=len(admission.prompt_ids),
        max_tokens=admission.max_tokens,
        limits=admission.limits,
        priority=admission.caller.priority,
        output_len=len(admission.output_ids),
        block_keys=() if keys is None else keys.grow(admission.prompt_ids + admission.output_ids),
        key_block_size=0 if keys is None else keys.block_size,
        size_bytes=admission.size_bytes,
    )


def fill(plan: Plan, live_by_key: Live) -> FilledStep:
    """The step to send. All of its sequences are live."""
    new: dict[int, LiveRequest] = {}
    slices = []
    for planned in plan.slices:
        live = live_by_key[planned.key]
        if planned.admitted:
            new[planned.slot] = live
        live.trace.computed()
        slices.append(
            Slice(
                slot=planned.slot,
                start=planned.start,
                count=planned.count,
                token_ids=live.ids_for(planned.start, planned.count),
                new_block_ids=planned.new_block_ids,
                samples=planned.samples,
                new=live.as_new_sequence(planned.start) if planned.admitted else None,
            )
        )
    return FilledStep(Step(plan.step_id, tuple(slices)), new, sum(piece.count for piece in slices))


def take_apart(plan: Plan, result: StepResult, live_by_key: Live) -> tuple[StepOutcome, dict[SequenceKey, Drawn]]:
    """What the core is told of a result, and what was drawn. Some of its sequences may have ended meanwhile."""
    sampling = [planned for planned in plan.slices if planned.samples]
    drawn: dict[SequenceKey, Drawn] = {}
    outcomes = []
    for planned, part in zip(sampling, result.results, strict=True):
        drawn[planned.key] = Drawn(part.token_ids, part.logprobs)
        outcomes.append(_outcome(live_by_key.get(planned.key), part))
    return StepOutcome(result.step_id, tuple(outcomes)), drawn


def _outcome(live: LiveRequest | None, part: SliceResult) -> SequenceOutcome:
    if live is None:
        return SequenceOutcome(part.slot, len(part.token_ids), failed=part.error is not None)
    if part.error is not None:
        live.verdict = endings.of_row_error(part.error)
        return SequenceOutcome(part.slot, 0, failed=True)
    ended = part.token_ids[-1] in live.admission.sampling.stop_token_ids
    return SequenceOutcome(part.slot, len(part.token_ids), ended=ended)
