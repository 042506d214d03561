"""Tokens to text: whole characters, stop strings, words, in any size of pushes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from storyteller.text import StopStrings, WordDetokenizer, detokenizer_for
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def told(tokenizer: Any, tokens: list[int], cuts: list[int]) -> str:
    """The text of a story whose tokens come in pieces of the sizes `cuts`."""
    detokenizer, text, rest = detokenizer_for(tokenizer)(), "", list(tokens)
    for cut in [*cuts, len(tokens)]:
        text += detokenizer.push(rest[:cut])
        rest = rest[cut:]
    return text + detokenizer.finish()


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=150, deadline=None)
def test_the_pieces_are_the_text_whatever_the_size_of_the_pushes(tokenizer: Any, text: str, cuts: list[int]) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert told(tokenizer, tokens, cuts) == text.rstrip("\ufffd")


@given(tokens=st.lists(st.integers(1, 299), max_size=40), cuts=st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_tokens_at_all_give_the_same_text_in_pieces_and_at_once(
    tokenizer: Any, tokens: list[int], cuts: list[int]
) -> None:
    assert told(tokenizer, tokens, cuts) == tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")


def test_no_piece_ends_within_a_character(tokenizer: Any) -> None:
    detokenizer = detokenizer_for(tokenizer)()
    tokens = tokenizer("a🐉b", add_special_tokens=False)["input_ids"]
    pieces = [detokenizer.push([token]) for token in tokens]
    assert [piece for piece in pieces if piece] == ["a", "🐉", "b"]


def test_a_character_that_the_limit_cuts_in_two_is_left_out(tokenizer: Any) -> None:
    tokens = tokenizer("ab🐉", add_special_tokens=False)["input_ids"]
    assert told(tokenizer, tokens[:-1], []) == "ab"


@pytest.mark.parametrize(
    ("stop", "pushes", "expected"),
    [
        (("END",), ["the ", "E", "N", "D", " more"], "the "),
        (("END",), ["the E", "Nd ", "END"], "the ENd "),
        (("aab",), ["aa", "ab", "x"], "a"),
        (("lamp", "am"), ["a l", "amp"], "a l"),
        ((), ["as it ", "is"], "as it is"),
        (("\n\n",), ["one\n", "two\n", "\nthree"], "one\ntwo"),
    ],
)
def test_text_ends_before_the_first_stop_string_even_where_it_comes_in_parts(
    stop: tuple[str, ...], pushes: list[str], expected: str
) -> None:
    stops = StopStrings(stop)
    assert "".join(stops.push(push) for push in pushes) + stops.finish() == expected
    assert stops.found == (expected != "".join(pushes))


@given(
    text=st.text("ab\n", max_size=30),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_a_stop_string_cuts_at_the_same_place_whatever_the_pushes(text: str, stop: list[str], cuts: list[int]) -> None:
    stops, out, rest = StopStrings(stop), "", text
    for cut in [*cuts, len(text)]:
        out += stops.push(rest[:cut])
        rest = rest[cut:]
        if stops.found:
            break
    out += stops.finish()
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert out == (text[: min(ends)[1]] if ends else text)
    assert stops.found == bool(ends)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(("castle",))
    assert stops.push("a brave cas") == "a brave "
    assert stops.push("e of ") == "case of "


def a_word_tokenizer(words: list[str]) -> Any:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")  # type: ignore[no-untyped-call]


def test_whole_words_are_joined_as_a_person_writes_them() -> None:
    text = "The dragon said: \"don't go (not yet), it's dark!\" and slept."
    words = ["The", "dragon", "said", ":", '"', "don", "'", "t", "go", "(", "not", "yet", ")", ",", "it", "s", "dark"]
    tokenizer = a_word_tokenizer([*words, "!", "and", "slept", "."])
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert told(tokenizer, tokens, [1] * len(tokens)) == text


def test_pieces_of_a_word_are_joined_without_a_space() -> None:
    detokenizer = WordDetokenizer(lambda tokens: [["dra", "##gon", "s", "."][token] for token in tokens], "##")
    assert detokenizer.push([0]) + detokenizer.push([1]) + detokenizer.push([2, 3]) == "dragon s."
