"""Who gets into the queue, and the accounts that this needs: quotas, the ladder, what answers used to be long.

Knows the queue's sums, tenants as names and costs as numbers; no lanes but their specs. Invariant: a refusal changes
nothing but the ladder's memory of the pressure.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace

from services.scheduler.core.admission import check_block_keys, fit, queue_room, validate
from services.scheduler.core.calls import CoreConfig, InvariantError, LaneSpec, Reason, SequenceKey, Submission
from services.scheduler.core.degrade import Ladder
from services.scheduler.core.expected_output import OutputHistory
from services.scheduler.core.limits import Rung
from services.scheduler.core.policies.fair import TokenCounters
from services.scheduler.core.policies.queue import WaitingQueue
from services.scheduler.core.quota import Quotas
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Pass:
    """What a submission is let in with."""

    submissions: tuple[Submission, ...]  # one a sequence; max_tokens may be less than asked, and there may be fewer
    limit: int | None  # tokens each may reach; None: no lane says
    expected_output: int | None
    charges: tuple[int, ...]  # tokens, on the tenant's account: the prompt is the first's
    degraded: tuple[Rung, ...]

    def sequences(self, arrivals: int, now: int) -> tuple[Sequence, ...]:
        """arrivals: of sequences before these."""
        made = tuple(
            Sequence(
                submission,
                arrival=arrivals + place + 1,
                submitted_at=now,
                queued_at=now,
                limit=self.limit,
                expected_output=self.expected_output,
                sibling=place > 0,
            )
            for place, submission in enumerate(self.submissions)
        )
        for sequence in made:
            if sequence.submission.output_len:  # the answer has begun: what counts is the time to its next token
                sequence.admitted, sequence.last_token_at = True, now
        return made


class Gate:
    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.quotas = Quotas(config.default_quota, config.quotas)
        self.ladder = Ladder(config.ladder)
        self.history = OutputHistory()
        weights = {tenant: quota.weight for tenant, quota in config.quotas.items()}
        self.counters = TokenCounters(weights, config.default_quota.weight)

    def look(self, submission: Submission, waiting: WaitingQueue, specs: Series[LaneSpec], now: int) -> Pass:
        """Raises a SubmitError. Without specs the fit is unknown, and looked at when there are."""
        each = submission.each()
        for one in each:
            validate(one)
            check_block_keys(len(one.block_keys), one.key_block_size, one.prompt_len + one.output_len)
            if specs:
                fit(one, specs)  # before anything is taken away
        self.watch(waiting, now)
        self.ladder.admit(submission.priority)
        each, degraded = self._degrade(each)
        limit = min(fit(one, specs) for one in each) if specs else None
        queue_room(each, len(waiting), waiting.tokens, waiting.size_bytes, self._config)
        expected = None
        if self._config.learn_output and submission.max_tokens is None:
            expected = self.history.expected(submission.tenant)
        charges = tuple(
            self._charge(one, expected, limit) - (one.prompt_len if place else 0) for place, one in enumerate(each)
        )
        self.quotas.check(submission.tenant, sum(charges), now, len(each))
        return Pass(each, limit, expected, charges, degraded)

    def watch(self, waiting: WaitingQueue, now: int) -> None:
        """Tells the ladder how full the queue is, by the limit that is nearest."""
        config = self._config
        self.ladder.observe(
            max(
                len(waiting) / config.max_queued_requests,
                waiting.tokens / config.max_queued_tokens,
                waiting.size_bytes / config.max_queued_bytes,
            ),
            now,
        )

    def enter(self, let_in: Pass, now: int) -> None:
        for submission, charge in zip(let_in.submissions, let_in.charges, strict=True):
            self.quotas.charge(submission.tenant, submission.key, charge, now)

    def served(self, tokens: Mapping[str, int]) -> None:
        """Output tokens that tenants were given."""
        for tenant, count in tokens.items():
            self.counters.charge(tenant, output=count)

    def ended(self, sequence: Sequence, reason: Reason, now: int) -> None:
        submission = sequence.submission
        self.quotas.settle(sequence.key, self._used(sequence), now)
        if reason in (Reason.STOP, Reason.LENGTH):
            self.history.observe(submission.tenant, submission.output_len + sequence.delivered)
        if len(self.counters) > 4096:
            self.counters.forget_idle(self.quotas.live())

    def check(self, live: Mapping[SequenceKey, Sequence]) -> None:
        """Raises InvariantError where the accounts are not those of what lives."""
        self.quotas.verify(live)
        deposits: dict[str, int] = {}
        for sequence in live.values():
            if sequence.deposit and sequence.placement is None:
                raise InvariantError(f"{sequence.key} waits, and holds a deposit")
            tenant = sequence.submission.tenant
            deposits[tenant] = deposits.get(tenant, 0) + sequence.deposit
        self.counters.check({tenant: held for tenant, held in deposits.items() if held})

    def _used(self, sequence: Sequence) -> int:
        """Tokens that its tenant pays for: of a prompt nobody began to compute, none; of siblings' prompt, once."""
        own_prompt = sequence.charged and not sequence.sibling
        return (sequence.submission.prompt_len if own_prompt else 0) + sequence.delivered

    def _charge(self, submission: Submission, expected: int | None, limit: int | None) -> int:
        """Prompt and the most output it may have; where that is the context, what is expected of it."""
        if submission.max_tokens is not None:
            return submission.prompt_len + submission.max_tokens - submission.output_len
        output = self._config.default_output_estimate if expected is None else expected
        if limit is not None:
            output = min(output, limit - submission.prompt_len)
        return submission.prompt_len + max(1, output - submission.output_len)

    def _degrade(self, each: tuple[Submission, ...]) -> tuple[tuple[Submission, ...], tuple[Rung, ...]]:
        ladder, priority, max_tokens = self.ladder, each[0].priority, each[0].max_tokens
        drawn = max(one.output_len for one in each)
        taken = [Rung.PREFILL_SHARE] if ladder.hits(Rung.PREFILL_SHARE, priority) else []
        if len(each) > 1 and not each[0].resumed and ladder.hits(Rung.SINGLE_ANSWER, priority):
            taken.append(Rung.SINGLE_ANSWER)
            each = each[:1]
        cap = max(self._config.ladder.max_tokens, drawn + 1)
        if ladder.hits(Rung.MAX_TOKENS, priority) and (max_tokens is None or max_tokens > cap):
            taken.append(Rung.MAX_TOKENS)
            each = tuple(replace(one, max_tokens=cap) for one in each)
        return each, tuple(taken)
