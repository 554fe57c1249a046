"""Stop strings over token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_decode.core.stop import StopMatcher


def run_all(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    return "".join(shown) + matcher.flush(), None, shown


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the stop that is complete first, of those the one that began first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_nothing_of_a_split_stop_string_is_shown() -> None:
    text, stop, shown = run_all(["STOP"], ["ab", "STO", "P", "cd"])

    assert (text, stop) == ("ab", "STOP")
    assert shown == ["ab", "", ""]


def test_a_head_that_does_not_become_a_stop_string_is_shown_later() -> None:
    text, stop, shown = run_all(["STOP"], ["ab", "STO", "NE"])

    assert (text, stop) == ("abSTONE", None)
    assert shown == ["ab", "", "STONE"]


def test_the_head_at_the_end_of_the_stream_is_part_of_the_text() -> None:
    assert run_all(["STOP"], ["ab", "STO"])[0] == "abSTO"


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END", "ND"], ["xEN", "D"], ("x", "END")),
        (["abcd", "bc"], ["abcd"], ("a", "bc")),
        (["b", "a"], ["cab"], ("c", "a")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["\n\n"], ["x\n", "\ny"], ("x", "\n\n")),
        (["", "x"], ["axb"], ("a", "x")),
    ],
)
def test_the_match_that_is_complete_first_wins(
    stops: list[str], pieces: list[str], expected: tuple[str, str | None]
) -> None:
    assert run_all(stops, pieces)[:2] == expected


def test_a_stop_string_before_min_tokens_passes_and_a_later_one_ends_the_stream() -> None:
    matcher = StopMatcher(["ab"])

    first = matcher.push("ab", is_armed=False)
    second = matcher.push("ca", is_armed=True)
    third = matcher.push("b", is_armed=True)

    assert [first, second, third] == [("ab", None), ("c", None), ("", "ab")]


@given(
    stops=st.lists(st.text(alphabet="abc", max_size=4), max_size=3),
    pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    text, stop, _ = run_all(stops, pieces)

    assert (text, stop) == reference(stops, "".join(pieces))
