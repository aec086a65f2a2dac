"""Drives a runner without a scheduler: each sequence gets its own blocks, prompts go in chunks."""

from collections.abc import Sequence

from executor.runner import Runner
from executor.step import NewSequence, SamplingParams, Slice, Step

GREEDY = SamplingParams(temperature=0.0)


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    chunk: int = 1024,
) -> list[list[int]]:
    """All prompts as one batch, from an empty executor: prefill in chunks, then one token each a step."""
    runner.reset()
    size = runner.capacity.block_size
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    first_block = 0
    tables = []
    for prompt in prompts:
        blocks = -(-(len(prompt) + output_tokens) // size)
        tables.append(tuple(range(first_block, first_block + blocks)))
        first_block += blocks
    step_id = 0
    while any(len(output) < output_tokens for output in outputs):
        slices = []
        for slot, prompt in enumerate(prompts):
            if len(outputs[slot]) == output_tokens:
                continue
            start = done[slot]
            if start < len(prompt):
                ids = tuple(prompt[start : start + chunk])
                new = NewSequence(params[slot], len(prompt)) if start == 0 else None
                ends = start + len(ids) == len(prompt)
                slices.append(Slice(slot, start, len(ids), ids, tables[slot] if start == 0 else (), ends, new))
            else:
                slices.append(Slice(slot, start, 1, (), (), True))
            done[slot] += slices[-1].count
        step_id += 1
        for result in runner.run(Step(step_id, tuple(slices))).results:
            assert result.error is None, result.error
            outputs[result.slot] += result.token_ids
    runner.reset()
    return outputs
