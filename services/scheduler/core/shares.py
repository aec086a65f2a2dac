"""Tokens of one step that are left for prompts: for all, for long prompts together, for throttled classes together."""

from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.degrade import Ladder
from services.scheduler.core.limits import Rung
from services.scheduler.core.sequence import Sequence


class PromptShares:
    def __init__(self, tokens: int, ladder: Ladder, config: CoreConfig) -> None:
        self._ladder, self._config = ladder, config
        self._long = self._low = tokens

    def divide(self, tokens: int) -> None:
        """tokens: what this step has for prompts, known once the decodes are counted."""
        self._long = max(1, int(tokens * self._config.long_prompt_share))
        self._low = max(1, int(tokens * self._config.ladder.prefill_share))

    def is_long(self, missing: int) -> bool:
        return missing > self._config.long_prompt_tokens

    def allowed(self, sequence: Sequence, missing: int, *, alone: bool) -> int | None:
        """None: nothing but the step limits it. alone: nobody else wants the tokens that a long prompt would take."""
        left = self._long if self.is_long(missing) and not alone else None
        return self.of_class(sequence, left)

    def of_class(self, sequence: Sequence, left: int | None) -> int | None:
        if not self._throttled(sequence):
            return left
        return self._low if left is None else min(left, self._low)

    def spend(self, sequence: Sequence, missing: int, count: int) -> None:
        if self.is_long(missing):
            self._long = max(0, self._long - count)
        if self._throttled(sequence):
            self._low = max(0, self._low - count)

    def _throttled(self, sequence: Sequence) -> bool:
        return self._ladder.hits(Rung.PREFILL_SHARE, sequence.submission.priority)
