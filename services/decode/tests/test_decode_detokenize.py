"""Text out of ids, whatever the borders of characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from fleet_decode.core.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer


def all_text(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def bytes_detokenizer(pieces: list[bytes]) -> ByteDetokenizer:
    return ByteDetokenizer(pieces.__getitem__)


def sentencepiece_tokenizer() -> Tokenizer:
    """A Llama-2 kind of vocabulary: spaces as a mark, bytes as a fallback, the first space dropped."""
    tokens = ["▁the", "▁cat", "s", "▁", ".", "é", *(f"<0x{value:02X}>" for value in range(256))]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def test_a_character_split_over_tokens_appears_whole() -> None:
    pieces = [b"\xf0\x9f", b"\x98\x80", b" ok"]

    assert all_text(bytes_detokenizer(pieces), [0, 1, 2]) == ["", "😀", " ok", ""]


def test_a_broken_character_at_the_end_is_one_replacement() -> None:
    assert all_text(bytes_detokenizer([b"a\xf0\x9f"]), [0]) == ["a", "\ufffd"]


@given(raw=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_bytes_come_out_as_in_one_call(raw: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(borders)]

    text = "".join(all_text(bytes_detokenizer(pieces), range(len(pieces))))

    assert text == raw.decode("utf-8", "replace")


def test_the_window_keeps_spaces_and_split_characters_right() -> None:
    tokenizer = sentencepiece_tokenizer()
    face = [tokenizer.token_to_id(f"<0x{value:02X}>") for value in "😀".encode()]
    ids = [0, 1, 2, 3, *face, 4, tokenizer.token_to_id("<eos>")]

    texts = all_text(WindowDetokenizer(tokenizer.decode), ids)

    assert "".join(texts) == "the cats 😀." == tokenizer.decode(ids)
    assert texts[:3] == ["the", " cat", "s"]
    assert not any("\ufffd" in text for text in texts)


@given(ids=st.lists(st.integers(0, 5), max_size=30))
def test_the_window_makes_the_text_of_one_call(ids: list[int]) -> None:
    tokenizer = sentencepiece_tokenizer()

    assert "".join(all_text(WindowDetokenizer(tokenizer.decode), ids)) == tokenizer.decode(ids)
