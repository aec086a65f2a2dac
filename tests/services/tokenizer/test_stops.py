"""The matcher against the rule it states, written as one regular expression over the whole text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.invalid import InvalidText
from services.tokenizer.stops import MAX_STOP_CHARS, MAX_STOPS, StopHit, StopMatcher


def first_stop(text: str, stops: list[str]) -> re.Match[str] | None:
    longest_first = sorted(stops, key=len, reverse=True)
    return re.search("|".join(map(re.escape, longest_first)), text) if stops else None


def run(deltas: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], StopHit | None]:
    matcher = StopMatcher(stops, include_stop)
    out = []
    for delta in deltas:
        text, hit = matcher.push(delta)
        out.append(text)
        if hit is not None:
            return out, hit
    text, hit = matcher.flush()
    return [*out, text], hit


# A small alphabet makes overlaps likely.
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)
cut_texts = st.lists(st.text("abc", max_size=6), max_size=8)


@given(cut_texts, stop_lists, st.booleans())
def test_any_cut_of_any_text_gives_the_text_before_the_first_stop(
    deltas: list[str], stops: list[str], include_stop: bool
) -> None:
    text = "".join(deltas)
    out, hit = run(deltas, stops, include_stop)
    expected = first_stop(text, stops)
    if expected is None:
        assert hit is None
        assert "".join(out) == text
    else:
        assert hit == StopHit(expected.group(), expected.start(), expected.end())
        assert "".join(out) == text[: expected.end() if include_stop else expected.start()]


@given(cut_texts, stop_lists)
def test_held_back_is_no_more_than_may_become_a_stop(deltas: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = emitted = ""
    for delta in deltas:
        text, hit = matcher.push(delta)
        seen, emitted = seen + delta, emitted + text
        if hit is not None:
            return
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        possible = [stop for stop in stops if stop.startswith(held) or held.startswith(stop)]
        assert not held or possible


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1), stop_lists)
def test_a_hit_is_reported_as_soon_as_nothing_can_change_it(deltas: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for char in "".join(deltas):
        seen += char
        _, hit = matcher.push(char)
        settled = first_stop(seen, stops)
        if hit is not None:
            assert settled is not None
            return
        if settled is not None:
            # Not reported: so some longer or earlier stop must still be possible.
            begin = settled.start()
            assert any(
                len(stop) > len(seen) - place and stop.startswith(seen[place:])
                for stop in stops
                for place in range(begin + 1)
            )


def test_a_stop_split_over_tokens_never_leaks_its_head() -> None:  # L01
    assert run(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == (
        ["ABC", "", "", "", ""],
        StopHit("DEFGHIJ", 3, 10),
    )


def test_false_alarm_gives_all_held_text_once_and_in_order() -> None:  # L03
    assert run(["DEFG", "X"], ["DEFGHIJ"]) == (["", "DEFGX", ""], None)
    assert run(["one DEF"], ["DEFGHIJ"]) == (["one ", "DEF"], None)
    assert run(["aab"], ["aac", "abd"]) == (["a", "ab"], None)


@pytest.mark.parametrize(
    ("text", "stops", "emitted", "hit"),
    [
        ("so...", [".."], "so", StopHit("..", 2, 4)),
        ("xabcx", ["ab", "abc"], "x", StopHit("abc", 1, 4)),
        ("xabdx", ["ab", "abc"], "x", StopHit("ab", 1, 3)),
        ("abc", ["bc", "ab"], "", StopHit("ab", 0, 2)),
        ("abcd", ["bc", "abcd"], "", StopHit("abcd", 0, 4)),
        ("abcx", ["bc", "abcd"], "a", StopHit("bc", 1, 3)),
        ("hi 👨‍👩‍👧 there", ["👩"], "hi 👨\u200d", StopHit("👩", 5, 6)),
        ("first", ["first"], "", StopHit("first", 0, 5)),
    ],
)
def test_edge_cases(text: str, stops: list[str], emitted: str, hit: StopHit) -> None:  # L04
    for deltas in ([text], list(text)):
        out, found = run(deltas, stops)
        assert ("".join(out), found) == (emitted, hit)


def test_disarmed_text_holds_no_stop_but_may_hold_its_head() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END E", is_armed=False) == ("END ", None)
    assert matcher.push("ND") == ("", StopHit("END", 4, 7))


def test_nothing_comes_after_a_hit_or_the_end() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", StopHit(".", 1, 2))
    assert matcher.push("c.") == ("", None)
    assert matcher.flush() == ("", None)


@pytest.mark.parametrize(
    ("stops", "field"),
    [
        ([""], "stop[0]"),
        (["ok", "x" * (MAX_STOP_CHARS + 1)], "stop[1]"),
        (["a"] * (MAX_STOPS + 1), "stop"),
        (["\ud800"], "stop[0]"),
    ],
)
def test_stops_out_of_bounds_are_refused_by_name(stops: list[str], field: str) -> None:
    with pytest.raises(InvalidText) as refusal:
        StopMatcher(stops)
    assert refusal.value.field == field


def test_as_many_and_as_long_stops_as_allowed_are_found() -> None:
    stops = ["a" * (MAX_STOP_CHARS - 1) + chr(0x100 + i) for i in range(MAX_STOPS)]
    text = "a" * 5000 + chr(0x100 + MAX_STOPS - 1)
    out, hit = run([text[i : i + 7] for i in range(0, len(text), 7)], stops)
    assert hit is not None
    assert hit.stop == stops[-1]
    assert "".join(out) == text[: 5000 - (MAX_STOP_CHARS - 1)]
