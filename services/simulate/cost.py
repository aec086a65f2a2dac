"""What a step costs: nanoseconds as a function of the work in it, and the presets.

Pure. Knows steps as counts, not as sequences. Invariant: more work never costs less, and equal work costs the same to
the nanosecond, so that a run does not depend on the order in which steps are looked at.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step. A row is a slice of one token; a prompt's chunk is any longer slice, and the single last token of one.

    `decode_context`, `prefill_context`: for each token computed, the positions that it looks at (its own too), summed.
    """

    prefill_tokens: int
    decode_rows: int
    prefill_context: int
    decode_context: int


def chunk_context(start: int, count: int) -> int:
    """Positions looked at by the tokens [start, start + count) of one sequence: the sum of their own indices + 1."""
    return count * start + count * (count + 1) // 2


class CostError(ValueError):
    """A cost model that makes no sense. Names the field."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """step = base + prefill * tokens + decode * rows + context terms, where the first `free_tokens` tokens and rows of
    a step cost nothing besides base: on a GPU reading the weights hides them.

    All times in ns. `request_ns` is spent once a request outside of every step (edge, network): users wait for it,
    executors don't.
    """

    base_ns: float
    prefill_token_ns: float
    decode_row_ns: float
    prefill_context_ns: float  # a position looked at
    decode_context_ns: float
    free_tokens: int = 0
    request_ns: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise CostError(f"{field.name} is {value!r}; a number of at least 0 is needed")
        for name in ("free_tokens", "request_ns"):
            if not isinstance(getattr(self, name), int):
                raise CostError(f"{name} is {getattr(self, name)!r}; a whole number is needed")
        if self.base_ns < 1:
            raise CostError(f"base_ns is {self.base_ns}; a step takes at least 1 ns")

    def step_ns(self, work: StepWork) -> int:
        free = self.free_tokens
        prefill = work.prefill_tokens - free
        rows = work.decode_rows
        if prefill < 0:  # what prompts leave of the free tokens goes to the rows
            rows = max(0, rows + prefill)
            prefill = 0
        return int(
            self.base_ns
            + self.prefill_token_ns * prefill
            + self.decode_row_ns * rows
            + self.prefill_context_ns * work.prefill_context
            + self.decode_context_ns * work.decode_context
        )

    def rows_ns(self, rows: int) -> float:
        """Of a step of rows alone, what does not depend on their context: the same float that `step_ns` arrives at."""
        return self.base_ns + self.decode_row_ns * max(0, rows - self.free_tokens)

    def scaled(self, factor: float) -> "CostModel":
        """Of an executor that takes `factor` times as long for every step."""
        return dataclasses.replace(
            self,
            base_ns=self.base_ns * factor,
            prefill_token_ns=self.prefill_token_ns * factor,
            decode_row_ns=self.decode_row_ns * factor,
            prefill_context_ns=self.prefill_context_ns * factor,
            decode_context_ns=self.decode_context_ns * factor,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> CostModel:
    """Raises CostError naming what is missing, unknown or out of range."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise CostError(f"the cost model is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CostError("the cost model is not a JSON object")
    names = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(CostModel)}
    unknown = [name for name in fields if name not in names]
    missing = [name for name, needed in names.items() if needed and name not in fields]
    if unknown or missing:
        problems = [*(f"{name} is unknown" for name in unknown), *(f"{name} is missing" for name in missing)]
        raise CostError(f"cost model: {', '.join(problems)}")
    return CostModel(**fields)


PRESETS: Final = {
    # SmolLM2-135M Q4_1 on the `cpu` back end, 2 AVX-512 cores.
    "cpu-2core": CostModel(
        base_ns=2.15e7,
        prefill_token_ns=1.5e6,
        decode_row_ns=5.1e6,
        prefill_context_ns=300.0,
        decode_context_ns=2000.0,
        request_ns=8_000_000,
    ),
    # Not measured: the shape of a large accelerator that serves a model of about 8 billion weights in 16 bits. Reading
    # the weights takes 6 ms, 200 tokens hide behind it; 25 us a token beyond (40,000 tokens a second of prefill).
    "gpu-like": CostModel(
        base_ns=6.0e6,
        prefill_token_ns=2.5e4,
        decode_row_ns=2.5e4,
        prefill_context_ns=1.5,
        decode_context_ns=40.0,
        free_tokens=200,
        request_ns=3_000_000,
    ),
}
