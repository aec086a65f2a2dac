"""Pieces: text and the ids that belong to it, and how many tokens count once a stop string was found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stops import StopMatcher
from services.tokenizer.stream import Piece, TextStream


def text_stream(
    tokens: list[bytes], stops: list[str], *, include_stop: bool = False, min_tokens: int = 0
) -> TextStream:
    """Ids are places in the list; an empty token stands for a special one."""
    detokenizer = Detokenizer(lambda i: tokens[i], lambda i: False)
    return TextStream(detokenizer, StopMatcher(stops, include_stop), min_tokens=min_tokens)


def run(tokens: list[bytes], stops: list[str], **options: bool) -> tuple[list[list[Piece]], TextStream]:
    stream = text_stream(tokens, stops, **options)
    return [*(stream.push([i]) for i in range(len(tokens))), stream.finish()], stream


def joined(pieces: list[list[Piece]]) -> tuple[str, list[int]]:
    flat = [piece for part in pieces for piece in part]
    return "".join(piece.text for piece in flat), [i for piece in flat for i in piece.token_ids]


def test_ids_ride_with_the_text_that_they_complete() -> None:
    pieces, stream = run([b"Hi", b" \xf0\x9f", b"\x98\x80", b"", b"!"], [])
    assert pieces == [
        [Piece("Hi", (0,))],
        [Piece(" ", ())],
        [Piece("😀", (1, 2))],
        [Piece("", (3,))],
        [Piece("!", (4,))],
        [],
    ]
    assert stream.kept_tokens == 5
    assert stream.hit is None


def test_a_stop_split_over_tokens() -> None:  # L01
    pieces, stream = run([b"ABC", b"DEF", b"G", b"HI", b"J", b"K"], ["DEFGHIJ"])
    assert pieces == [[Piece("ABC", (0,))], [], [], [], [Piece("", (1, 2, 3, 4))], [], []]
    assert stream.kept_tokens == 5
    assert stream.hit is not None
    assert stream.hit.stop == "DEFGHIJ"


def test_a_false_alarm_gives_everything_once() -> None:  # L03
    pieces, stream = run([b"DEF", b"G", b"X"], ["DEFGHIJ"])
    assert pieces == [[], [], [Piece("DEFGX", (0, 1, 2))], []]
    pieces, stream = run([b"A", b"DE"], ["DEFGHIJ"])
    assert pieces == [[Piece("A", (0,))], [], [Piece("DE", (1,))]]
    assert stream.kept_tokens == 2


@pytest.mark.parametrize(("include_stop", "text"), [(False, "so"), (True, "so..")])
def test_a_stop_inside_a_longer_token_cuts_text_at_the_character(include_stop: bool, text: str) -> None:  # L04
    pieces, stream = run([b"so", b"...and", b"more"], [".."], include_stop=include_stop)
    assert joined(pieces) == (text, [0, 1])
    assert stream.kept_tokens == 2


def test_kept_tokens_do_not_depend_on_when_the_match_was_certain() -> None:
    # "ab" is complete with token 1, but only token 2 rules "abc" out.
    pieces, stream = run([b"xa", b"b", b"d", b"e"], ["ab", "abc"])
    assert joined(pieces) == ("x", [0, 1])
    assert stream.kept_tokens == 2
    pieces, stream = run([b"xa", b"b"], ["ab", "abc"])
    assert joined(pieces) == ("x", [0, 1])
    assert stream.hit is not None
    assert stream.hit.stop == "ab"


def test_a_stop_character_of_several_tokens_needs_the_last_of_them() -> None:
    pieces, stream = run([b"a\xf0\x9f", b"\x98", b"\x80", b"z"], ["😀"])
    assert joined(pieces) == ("a", [0, 1, 2])
    assert stream.kept_tokens == 3


def test_a_stop_in_the_very_first_token_and_in_the_last_incomplete_one() -> None:
    pieces, stream = run([b"\n\nNext"], ["\n\n"])
    assert joined(pieces) == ("", [0])
    pieces, stream = run([b"a", b"\xf0\x9f"], ["\ufffd"])
    assert joined(pieces) == ("a", [0, 1])
    assert stream.hit is not None


def test_ids_that_were_in_flight_are_dropped() -> None:
    stream = text_stream([b"a", b".", b"b", b"c"], ["."])
    assert stream.push([0, 1, 2]) == [Piece("a", (0, 1))]
    assert stream.push([3]) == []
    assert stream.finish() == []
    assert stream.kept_tokens == 2


def test_min_tokens_lets_early_stops_pass() -> None:
    tokens = [b"a", b".", b"b", b".", b"c"]
    stream = text_stream(tokens, ["."], min_tokens=2)
    pieces = [stream.push([i]) for i in range(5)]
    assert joined(pieces) == ("a.b", [0, 1, 2, 3])
    assert stream.kept_tokens == 4


token_lists = st.lists(st.one_of(st.text("ab😀", max_size=3).map(str.encode), st.binary(max_size=2)), max_size=10)


@given(token_lists, st.lists(st.text("ab😀\ufffd", min_size=1, max_size=3), max_size=3), st.booleans(), st.data())
def test_any_cut_gives_the_text_before_the_first_stop_and_each_kept_id_once(
    tokens: list[bytes], stops: list[str], include_stop: bool, data: st.DataObject
) -> None:
    stream = text_stream(tokens, stops, include_stop=include_stop)
    pieces, at = [], 0
    while at < len(tokens):
        step = data.draw(st.integers(1, 3))
        pieces.append(stream.push(range(at, min(at + step, len(tokens)))))
        at += step
    pieces.append(stream.finish())
    text, ids = joined(pieces)

    whole = b"".join(tokens).decode("utf-8", errors="replace")
    begins = [whole.find(stop) for stop in stops if stop in whole]
    if not begins:
        assert (text, ids) == (whole, list(range(len(tokens))))
        assert stream.kept_tokens == len(tokens)
        return
    begin = min(begins)
    stop = max((stop for stop in stops if whole.startswith(stop, begin)), key=len)
    end = begin + len(stop)
    assert text == whole[: end if include_stop else begin]
    # The first token after which, with what follows unknown, the decoded text holds the whole stop string.
    decoder = Detokenizer(lambda i: tokens[i], lambda i: False)
    decoded, kept = 0, len(tokens)
    for i in range(len(tokens)):
        decoded += len(decoder.push([i]))
        if decoded >= end:
            kept = i + 1
            break
    assert stream.kept_tokens == kept
    assert ids == list(range(kept))
