"""Between the core's lengths and everybody else's ids: a request measured, a plan filled with what the shell knows, a
result taken apart.

Changes nothing but traces and verdicts of the requests in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.step import Slice, SliceResult, Step, StepResult
from services.scheduler import endings
from services.scheduler.core.calls import (
    OutOfStep,
    Plan,
    PlannedSlice,
    SequenceKey,
    SequenceOutcome,
    Sibling,
    StepOutcome,
    Submission,
)
from services.scheduler.intake import Admission
from services.scheduler.live import FilledStep, LiveAnswer
from services.scheduler.outbox import Drawn, Scored
from services.scheduler.prefix_keys import KeyChain

Live = Mapping[SequenceKey, LiveAnswer]


@dataclass(slots=True)
class Apart:
    """A result: what the core is told, what was drawn, which logprobs of prompts it has, and which answers failed
    without a draw."""

    outcome: StepOutcome
    drawn: dict[SequenceKey, Drawn] = field(default_factory=dict)
    scored: list[tuple[LiveAnswer, Scored]] = field(default_factory=list)
    failed: list[LiveAnswer] = field(default_factory=list)


def measured(
    keys: Mapping[int, SequenceKey], admission: Admission, chain: KeyChain | None
) -> tuple[Submission, dict[int, KeyChain]]:
    """What the core is told of a request, and the chain of each answer's block keys.

    keys: of its answers that are to be drawn, by index. chain: of the prompt's blocks; None: it takes no part in the
    prefix cache.
    """
    prompt = admission.prompt_ids
    shared = () if chain is None else chain.grow(prompt)
    chains = {} if chain is None else {index: chain.copy() for index in keys}
    siblings = []
    for index, key in keys.items():
        output = admission.answers[index].output_ids
        own = chains[index].grow(prompt + output) if output and index in chains else ()
        siblings.append(Sibling(key, len(output), shared + own))
    first, *others = siblings
    submission = Submission(
        key=first.key,
        tenant=admission.caller.tenant,
        prompt_len=len(prompt),
        max_tokens=admission.max_tokens,
        limits=admission.limits,
        priority=admission.caller.priority,
        output_len=first.output_len,
        resumed=admission.resumed,
        block_keys=first.block_keys,
        key_block_size=0 if chain is None else chain.block_size,
        size_bytes=admission.size_bytes,
        others=tuple(others),
        scores_prompt=admission.scores_prompt,
    )
    return submission, chains


def fill(plan: Plan, live: Live) -> FilledStep:
    """The step to send. All of its sequences are live."""
    new: dict[int, LiveAnswer] = {}
    scoring = []
    slices = []
    for planned in plan.slices:
        answer = live[planned.key]
        if planned.admitted:
            new[planned.slot] = answer
        answer.trace.computed()
        if _scores(planned, answer):
            scoring.append(planned.slot)
        slices.append(
            Slice(
                slot=planned.slot,
                start=planned.start,
                count=planned.count,
                token_ids=answer.ids_for(planned.start, planned.count),
                new_block_ids=planned.new_block_ids,
                samples=planned.samples,
                new=answer.as_new_sequence(planned.start) if planned.admitted else None,
            )
        )
    tokens = sum(piece.count for piece in slices)
    return FilledStep(Step(plan.step_id, tuple(slices)), new, frozenset(scoring), tokens)


def take_apart(plan: Plan, scoring: frozenset[int], result: StepResult, live: Live) -> Apart:
    """scoring: as `fill` told of the plan. Some of its sequences may have ended meanwhile.

    Raises OutOfStep where the rows are not those of the step.
    """
    answered = [planned for planned in plan.slices if planned.samples or planned.slot in scoring]
    if [planned.slot for planned in answered] != [part.slot for part in result.results]:
        raise OutOfStep(f"step {plan.step_id} has results of other slots than it asked for")
    outcomes = []
    apart = Apart(StepOutcome(result.step_id, ()))
    for planned, part in zip(answered, result.results, strict=True):
        answer = live.get(planned.key)
        if planned.slot in scoring and answer is not None and part.error is None:
            apart.scored.append((answer, _scored(planned, part, answer)))
        if planned.samples:
            apart.drawn[planned.key] = Drawn(part.token_ids, part.logprobs)
            outcomes.append(_outcome(answer, part))
        elif part.error is not None and answer is not None:
            answer.request.verdict = endings.of_row_error(part.error)
            apart.failed.append(answer)
    apart.outcome = StepOutcome(result.step_id, tuple(outcomes))
    return apart


def _scores(planned: PlannedSlice, answer: LiveAnswer) -> bool:
    """Its stay began at 0, with nothing drawn: see `LiveAnswer.as_new_sequence`."""
    prompt_len = len(answer.request.admission.prompt_ids)
    return answer.scores and not answer.output_tokens and planned.start < prompt_len


def _scored(planned: PlannedSlice, part: SliceResult, answer: LiveAnswer) -> Scored:
    first = max(planned.start, 1)
    end = min(planned.start + planned.count, len(answer.request.admission.prompt_ids))
    if len(part.prompt_logprobs) != max(0, end - first):
        raise OutOfStep(f"slot {planned.slot} has {len(part.prompt_logprobs)} prompt logprobs of {end - first} tokens")
    return Scored(first - 1, part.prompt_logprobs)


def _outcome(answer: LiveAnswer | None, part: SliceResult) -> SequenceOutcome:
    if answer is None:
        return SequenceOutcome(part.slot, len(part.token_ids), failed=part.error is not None)
    if part.error is not None:
        answer.request.verdict = endings.of_row_error(part.error)
        return SequenceOutcome(part.slot, 0, failed=True)
    ended = part.token_ids[-1] in answer.request.admission.sampling.stop_token_ids
    return SequenceOutcome(part.slot, len(part.token_ids), ended=ended)
