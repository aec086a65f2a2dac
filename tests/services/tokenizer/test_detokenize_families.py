"""Random ids of every family: deltas joined are the decoding of all, whatever the cuts (T01 to T05).

`python tests/services/tokenizer/test_detokenize_families.py 100000` from the repository's root runs as many sequences.
"""

import random
import sys

import pytest
from families import FAMILIES, model_of

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stops import StopMatcher
from services.tokenizer.stream import TextStream
from services.tokenizer.text import TextModel


def check_sequence(model: TextModel, chance: random.Random) -> None:
    ids = [chance.randrange(model.vocab_size) for _ in range(chance.randint(0, 24))]
    keep_special = chance.random() < 0.5
    detokenizer = Detokenizer(model.token_bytes, model.is_special, skip_special=not keep_special)
    stream = TextStream(detokenizer, StopMatcher((), False))
    text, seen, at = "", [], 0
    while at < len(ids):
        step = chance.randint(1, 4)
        for piece in stream.push(ids[at : at + step]):
            text += piece.text
            seen += piece.token_ids
        at += step
    for piece in stream.finish():
        text += piece.text
        seen += piece.token_ids
    assert text == model.decode(ids, skip_special=not keep_special, is_continued=True), ids
    assert seen == ids


@pytest.mark.parametrize("family", FAMILIES)
def test_deltas_of_random_ids_are_the_decoding_of_all(family: str) -> None:
    chance = random.Random(family)
    for _ in range(200):
        check_sequence(model_of(family), chance)


if __name__ == "__main__":
    count = int(sys.argv[1])
    for number in range(count):
        check_sequence(model_of(FAMILIES[number % len(FAMILIES)]), random.Random(number))
    print(f"{count} sequences over {len(FAMILIES)} families: no failure")
