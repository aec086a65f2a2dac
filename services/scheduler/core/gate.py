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

    submission: Submission  # its max_tokens may be less than asked
    limit: int | None  # tokens it may reach; None: no lane says
    expected_output: int | None
    charge: int  # tokens, on its tenant's account
    degraded: tuple[Rung, ...]


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
        validate(submission)
        known = submission.prompt_len + submission.output_len
        check_block_keys(len(submission.block_keys), submission.key_block_size, known)
        limit = fit(submission, specs) if specs else None  # before anything is taken away
        self.watch(waiting, now)
        self.ladder.admit(submission.priority)
        submission, degraded = self._degrade(submission)
        if specs:
            limit = fit(submission, specs)
        queue_room(submission, len(waiting), waiting.tokens, waiting.size_bytes, self._config)
        expected = None
        if self._config.learn_output and submission.max_tokens is None:
            expected = self.history.expected(submission.tenant)
        charge = self._charge(submission, expected, limit)
        self.quotas.check(submission.tenant, charge, now)
        return Pass(submission, limit, expected, charge, degraded)

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
        submission = let_in.submission
        self.quotas.charge(submission.tenant, submission.key, let_in.charge, now)

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
        """Tokens that its tenant pays for: of a prompt nobody began to compute, none."""
        return (sequence.submission.prompt_len if sequence.charged else 0) + sequence.delivered

    def _charge(self, submission: Submission, expected: int | None, limit: int | None) -> int:
        """Prompt and the most output it may have; where that is the context, what is expected of it."""
        if submission.max_tokens is not None:
            return submission.prompt_len + submission.max_tokens - submission.output_len
        output = self._config.default_output_estimate if expected is None else expected
        if limit is not None:
            output = min(output, limit - submission.prompt_len)
        return submission.prompt_len + max(1, output - submission.output_len)

    def _degrade(self, submission: Submission) -> tuple[Submission, tuple[Rung, ...]]:
        ladder, priority = self.ladder, submission.priority
        taken = [rung for rung in (Rung.PREFILL_SHARE, Rung.SINGLE_ANSWER) if ladder.hits(rung, priority)]
        if Rung.SINGLE_ANSWER in taken and submission.answers == 1:
            taken.remove(Rung.SINGLE_ANSWER)
        cap = max(self._config.ladder.max_tokens, submission.output_len + 1)
        if ladder.hits(Rung.MAX_TOKENS, priority) and (submission.max_tokens is None or submission.max_tokens > cap):
            taken.append(Rung.MAX_TOKENS)
            submission = replace(submission, max_tokens=cap)
        return submission, tuple(taken)
