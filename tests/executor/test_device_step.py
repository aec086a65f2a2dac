"""Decode steps in static buffers: which bucket, what is written there, which token feeds which row; and that the tokens
are those of the runner."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from device_step import Driver, decode_as_runner
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TinySpec, write_tiny_model

from executor.device.buckets import SPLIT, Bucket, BucketError, bucket_table, choose, most_padding
from executor.device.decode import FAULT, GreedySampler
from executor.device.layout import FEED, DecodeRow, Scratch, fill, layout

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2, 8]), st.sampled_from([1, 58, 132]))


@given(SIZES, st.data())
def test_every_step_has_a_bucket_and_no_smaller_one(sizes: tuple[int, int, int, int], data: st.DataObject) -> None:
    sequences, longest, _, _ = sizes
    table = bucket_table(*sizes)
    rows, keys = data.draw(st.integers(1, sequences)), data.draw(st.integers(1, longest))
    found = choose(table, rows, keys)
    assert found in table
    assert found.rows >= rows
    assert not any(rows <= bucket.rows < found.rows for bucket in table)
    if found.splits > 1:
        assert -(-keys // SPLIT) <= found.splits
        smaller = [b for b in table if b.rows == found.rows and 1 < b.splits < found.splits]
        assert all(b.splits < -(-keys // SPLIT) for b in smaller)
    assert found.rows - rows <= most_padding(table)
    assert max(bucket.rows for bucket in table) == sequences


def test_few_rows_split_their_keys_and_many_do_not() -> None:
    table = bucket_table(256, 8192, 8, 132)
    assert choose(table, 1, 100) == Bucket(1, 1)
    assert choose(table, 1, 8192) == Bucket(1, 32)
    assert choose(table, 32, 700) == Bucket(32, 4)
    assert choose(table, 33, 8192) == Bucket(64, 1)
    assert most_padding(table) == 31
    assert len(table) == 6 * 6 + 7


def test_what_is_not_recorded_is_refused() -> None:
    table = bucket_table(8, 1024, 8, 132)
    with pytest.raises(BucketError, match="a step has 9 rows, recorded are 1 to 8"):
        choose(table, 9, 1)
    with pytest.raises(BucketError, match="a sequence has 1025 tokens, recorded are up to 1024"):
        choose(table, 1, 1025)
    with pytest.raises(ValueError, match="max_model_len must be at least 1, got 0"):
        bucket_table(1, 0, 1, 1)


BLOCK = 16
SCRATCH = Scratch(first_block=900, blocks=2, slot=77)


def rows_of(lengths: Sequence[int]) -> list[DecodeRow]:
    return [
        DecodeRow(slot, length - 1, None if slot % 2 else 1000 + slot, range(slot * 64, slot * 64 + 64))
        for slot, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 255))
def test_a_filled_bucket_says_all_and_only_this_step(lengths: list[int], before: int) -> None:
    table = bucket_table(20, 1000, 8, 132)
    bucket = choose(table, len(lengths), max(lengths))
    where = layout(bucket, 63)
    memory = np.full(where.nbytes, before, dtype=np.uint8)  # of an earlier step
    fill(where, memory, rows_of(lengths), SCRATCH, BLOCK)
    count = len(lengths)
    look = {name: where.view(memory, name) for name in where.fields}
    assert look["positions"][:count].tolist() == [length - 1 for length in lengths]
    assert look["given"][:count].tolist() == [FEED if slot % 2 else 1000 + slot for slot in range(count)]
    for slot, length in enumerate(lengths):
        block, place = divmod(length - 1, BLOCK)
        assert look["slot_mapping"][slot] == (slot * 64 + block) * BLOCK + place
        assert look["tables"][slot, : block + 1].tolist() == list(range(slot * 64, slot * 64 + block + 1))
    padded = look["slot_mapping"][count:]
    assert len(set(look["slot_mapping"].tolist())) == bucket.rows  # nobody writes where another does
    assert ((padded >= 900 * BLOCK) & (padded < 902 * BLOCK)).all()
    assert (look["slots"][count:] == SCRATCH.slot).all()
    # Each row's keys are covered once, by items that are its own; rows that fill up have none.
    covered: dict[int, list[int]] = {}
    for row, first, tokens, position, split, part, _, _ in look["items"].tolist():
        if row < 0:
            continue
        assert (first, tokens, position) == (row, 1, lengths[row] - 1)
        keys = range(position + 1) if split < 0 else range(split * SPLIT, min((split + 1) * SPLIT, position + 1))
        assert split < 0 or row * bucket.splits <= part < (row + 1) * bucket.splits
        covered.setdefault(row, []).extend(keys)
    assert {row: sorted(keys) for row, keys in covered.items()} == {
        row: list(range(length)) for row, length in enumerate(lengths)
    }
    merged = [merge for merge in look["merges"].tolist() if merge[1]]
    assert {merge[0] for merge in merged} == (
        {row for row, length in enumerate(lengths) if length > SPLIT} if bucket.splits > 1 else set()
    )


def test_fields_lie_apart_and_aligned() -> None:
    where = layout(Bucket(8, 4), 33)
    fields = sorted(where.fields.values(), key=lambda field: field.offset)
    for one, other in pairwise(fields):
        assert one.offset + one.nbytes <= other.offset
    assert all(field.offset % 256 == 0 for field in fields)
    assert fields[-1].offset + fields[-1].nbytes <= where.nbytes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of([1] * 9), "a step of 9 rows does not go into a bucket of 8"),
        ([DecodeRow(0, 5, 1, [0]), DecodeRow(0, 6, 1, [1])], "a slot occurs twice"),
        ([DecodeRow(3, 16, 1, [0])], "slot 3: position 16 is beyond its 1 blocks"),
        ([DecodeRow(3, 700, 1, range(100))], "slot 3: 44 blocks, a table has 40"),
        ([DecodeRow(3, 600, 1, range(100))], "position 600 has 3 splits, the bucket 2"),
    ],
)
def test_a_row_that_does_not_fit_is_named(rows: list[DecodeRow], message: str) -> None:
    where = layout(Bucket(8, 2), 40)
    with pytest.raises(ValueError, match=message):
        fill(where, np.zeros(where.nbytes, dtype=np.uint8), rows, SCRATCH, BLOCK)


def test_greedy_takes_the_lowest_of_equals_and_tells_a_fault() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 1.0, 2.0], [float("-inf"), -5.0, float("-inf")]])
    zero = torch.zeros(3, dtype=torch.int64)
    assert GreedySampler().draw(logits, zero, zero).tolist() == [1, FAULT, 1]
    assert GreedySampler().draw(torch.full((1, 3), float("inf")), zero, zero).tolist() == [FAULT]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec(context=600))


@pytest.mark.parametrize("backend", ["reference", "cpu-torch"])
def test_tokens_are_those_of_the_runner(model: Path, backend: str) -> None:
    """Two in flight: each step but the first takes a token that the host has not seen."""
    decode_as_runner(model, backend, prompts=[3, 17, 40, 15, 1], tokens=8, sequences=7)


def test_rows_that_come_and_go_change_no_other(model: Path) -> None:
    driver = Driver(model, "reference", sequences=4)
    alone = driver.alone([5, 9, 30], tokens=6)
    driver.begin([5, 9, 30])
    together = driver.staggered(tokens=6)
    assert together == alone


def test_what_is_not_in_order_is_refused(model: Path) -> None:
    driver = Driver(model, "reference", sequences=2)
    decoder = driver.decoder(warm=False)
    row = DecodeRow(0, 0, 1, [0])
    with pytest.raises(RuntimeError, match="warm_up records steps, and was not called"):
        decoder.submit([row])
    decoder.warm_up()
    first, second = decoder.submit([row]), decoder.submit([DecodeRow(0, 1, None, [0])])
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        decoder.submit([row])
    with pytest.raises(RuntimeError, match="step 1 is not the oldest in flight"):
        decoder.collect(second)
    assert len(decoder.collect(first)) == len(decoder.collect(second)) == 1
    with pytest.raises(ValueError, match="steps are recorded on a CUDA device, not on cpu"):
        driver.decoder(graphs=True)
