"""Who may come in: does a request fit at all, has the queue room, will the pool last.

Functions of numbers; they change nothing. Invariant: what passes `fit` can be served by at least one lane alone, so
that the best protected sequence of a lane always can finish.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Series

from services.scheduler.core.calls import (
    CoreConfig,
    DoesNotFit,
    InvalidSubmission,
    LaneSpec,
    QueueFull,
    Submission,
)
from services.scheduler.core.sequence import Sequence

Demand = tuple[int, int]  # blocks: (left to grow, held once all that is known is computed)


def validate(submission: Submission) -> None:
    if submission.prompt_len < 1:
        raise InvalidSubmission("prompt_len", "the prompt is empty; at least 1 token is needed")
    if submission.max_tokens is not None and submission.max_tokens < 1:
        raise InvalidSubmission("max_tokens", f"max_tokens is {submission.max_tokens}; at least 1 is needed")
    if submission.output_len < 0:
        raise InvalidSubmission("output_len", f"output_len is {submission.output_len}, below 0")
    if submission.max_tokens is not None and submission.output_len >= submission.max_tokens:
        raise InvalidSubmission(
            "output_len", f"{submission.output_len} resumed tokens leave nothing of max_tokens {submission.max_tokens}"
        )


def check_block_keys(count: int, block_size: int, known: int) -> None:
    """Raises InvalidSubmission unless `known` tokens fill `count` blocks."""
    if count and not 1 <= block_size * count <= known:
        raise InvalidSubmission("block_keys", f"{count} block keys, but {known} tokens in blocks of {block_size}")


def fit(submission: Submission, specs: Iterable[LaneSpec]) -> int:
    """Tokens, prompt and output, that the sequence may reach on the roomiest lane. There is at least one lane.

    An absent max_tokens means up to the context, and no further than a lane's pool holds.
    Raises DoesNotFit with both numbers when no lane can hold it, even alone.
    """
    limits: list[int] = []
    refusals: list[tuple[int, DoesNotFit]] = []
    for spec in specs:
        try:
            limits.append(_fit_one(submission, spec))
        except DoesNotFit as refusal:
            refusals.append((spec.block_size * spec.total_blocks, refusal))
    if not limits:
        raise max(refusals, key=lambda refusal: refusal[0])[1]
    return max(limits)


def fits(sequence: Sequence, spec: LaneSpec) -> bool:
    """Whether this lane can hold it to its end, alone."""
    return sequence.bound <= spec.max_model_len and spec.blocks_for(sequence.bound - 1) <= spec.total_blocks


def _fit_one(submission: Submission, spec: LaneSpec) -> int:
    given = submission.prompt_len + submission.output_len
    if given >= spec.max_model_len:
        raise DoesNotFit(
            "prompt_len", f"{given} tokens leave no room for output in the context of {spec.max_model_len}"
        )
    if submission.max_tokens is None:
        limit = min(spec.max_model_len, spec.block_size * spec.total_blocks + 1)
        need = given
    else:
        limit = min(spec.max_model_len, submission.prompt_len + submission.max_tokens)
        need = limit - 1
    if spec.blocks_for(need) > spec.total_blocks:
        field_name = "prompt_len" if spec.blocks_for(given) > spec.total_blocks else "max_tokens"
        raise DoesNotFit(
            field_name,
            f"prompt of {submission.prompt_len} tokens with max_tokens {submission.max_tokens} needs "
            f"{spec.blocks_for(need)} blocks of {spec.block_size} tokens; the pool has {spec.total_blocks}",
        )
    return limit


def queue_room(coming: Series[Submission], waiting: int, tokens: int, size_bytes: int, config: CoreConfig) -> None:
    """Raises QueueFull; DoesNotFit where even the empty queue is too small. coming: the sequences of one request.
    `tokens`, `size_bytes`: of all waiting."""
    sums = (
        ("tokens", sum(one.prompt_len + one.output_len for one in coming), tokens, config.max_queued_tokens),
        ("bytes", sum(one.size_bytes for one in coming), size_bytes, config.max_queued_bytes),
    )
    for unit, own, _, most in sums:
        if own > most:
            raise DoesNotFit("prompt_len", f"{own} {unit} are more than the queue's {most}")
    if len(coming) > config.max_queued_requests:
        raise DoesNotFit("answers", f"{len(coming)} answers are more than the queue's {config.max_queued_requests}")
    if waiting + len(coming) > config.max_queued_requests:
        raise QueueFull("queued_requests", f"{waiting} requests wait; the limit is {config.max_queued_requests}")
    for unit, own, now, most in sums:
        if now + own > most:
            raise QueueFull(f"queued_{unit}", f"{now} {unit} wait and {own} would come; the limit is {most}")


def demand(sequence: Sequence, spec: LaneSpec, config: CoreConfig) -> Demand:
    """What admission expects the sequence to hold and to grow by."""
    most = limit = sequence.bound
    if sequence.submission.max_tokens is None:
        # Past the estimate each next token is expected to be the last.
        expected = sequence.expected_output
        estimate = sequence.submission.prompt_len + (config.default_output_estimate if expected is None else expected)
        limit = min(limit, max(estimate, sequence.length + 1))
    size = spec.block_size
    target = min(sequence.length, most - 1)
    return -(-max(0, limit - 1 - target) // size), -(-target // size)


def peak_blocks(demands: Iterable[Demand]) -> int:
    """The most blocks ever held if all advance in step and each leaves when nothing is left to it.

    max_i(left_i * (i + 1) + sum_{j <= i} run_j) over sequences by remaining length descending, i from 0: when
    sequence i ends, exactly those with more left are still there, grown as much as it. (LightLLM's admission; the
    Past-Future scheduler of ASPLOS'25 builds on the same sum.)
    """
    peak = held = 0
    for index, (left, run) in enumerate(sorted(demands, reverse=True)):
        held += run
        peak = max(peak, left * (index + 1) + held)
    return peak
