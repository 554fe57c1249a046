"""Where text is cut, and samples as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_audio.core.pcm import pcm16
from fleet_common.sentences import sentences


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One. Two! Three? Four", ("One.", "Two!", "Three?", "Four")),
        ("Dr. Smith met J. K. Rowling at 3.5 p.m. yesterday. They spoke.", None),
        ('He said "Stop." Then he left.', ('He said "Stop."', "Then he left.")),
        ("A line\nand another\n\n  and a third", ("A line", "and another", "and a third")),
        ("... !!! --", ()),
        ("", ()),
        ("今日は。元気?", ("今日は。", "元気?")),
        ("It was I. Then you.", ("It was I.", "Then you.")),
    ],
)
def test_text_is_cut_after_sentences(text: str, wanted: tuple[str, ...] | None) -> None:
    if wanted is None:
        wanted = ("Dr. Smith met J. K. Rowling at 3.5 p.m. yesterday.", "They spoke.")

    assert sentences(text, 200) == wanted


def test_a_long_sentence_is_cut_after_a_clause_else_between_words_else_anywhere() -> None:
    assert sentences("first part, second part and third", 20) == ("first part,", "second part and", "third")
    assert sentences("x" * 50, 20) == ("x" * 20, "x" * 20, "x" * 10)


@given(st.text(max_size=300), st.integers(20, 60))
def test_no_letter_is_lost_and_no_piece_is_too_long(text: str, max_chars: int) -> None:
    pieces = sentences(text, max_chars)

    assert all(0 < len(piece) <= max_chars and piece == piece.strip() for piece in pieces)
    assert [char for piece in pieces for char in piece if char.isalnum()] == [char for char in text if char.isalnum()]


def test_samples_become_16_bits_and_loud_ones_are_cut() -> None:
    samples = np.array([0.0, 0.5, 1.0, -1.0, 7.0, np.nan, -np.inf], np.float32)

    assert np.frombuffer(pcm16(samples), "<i2").tolist() == [0, 16384, 32767, -32767, 32767, 0, -32767]
