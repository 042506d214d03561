"""Words and free text to prompts, with and without a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from storyteller import wire
from storyteller.prompts import DEFAULTS, Prompter, PromptError, read_voices
from storyteller.story import Sampling
from tests.checkpoints import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[told]{% endif %}"
)


def a_prompter(folder: Path, template: str | None) -> tuple[Prompter, Any]:
    make_tokenizer(folder, template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Prompter(tokenizer, read_voices()), tokenizer


def test_words_go_through_the_voice_and_the_template(tmp_path: Path) -> None:
    prompter, tokenizer = a_prompter(tmp_path, TEMPLATE)
    text = tokenizer.decode(prompter.tokens(wire.Words(("dragon", "castle", "brave")), None))
    voice = read_voices().voices[read_voices().default]
    assert text == f"[system]{voice.system}[user]{voice.words.format(words='dragon, castle, brave')}[told]"


def test_a_model_without_a_template_gets_plain_words_and_free_text_as_it_is(tmp_path: Path) -> None:
    prompter, tokenizer = a_prompter(tmp_path, None)
    words = tokenizer.decode(prompter.tokens(wire.Words(("dragon", "castle")), None))
    assert "dragon, castle" in words
    assert "[system]" not in words
    assert tokenizer.decode(prompter.tokens(wire.Text("Once upon"), None)) == "Once upon"


def test_braces_in_a_players_text_are_just_text(tmp_path: Path) -> None:
    prompter, tokenizer = a_prompter(tmp_path, TEMPLATE)
    assert "{words} {0}" in tokenizer.decode(prompter.tokens(wire.Text("{words} {0}"), None))


def test_a_raw_prompt_is_given_as_it_is_and_an_empty_one_begins_with_the_models_own_token(tmp_path: Path) -> None:
    prompter, tokenizer = a_prompter(tmp_path, TEMPLATE)
    assert tokenizer.decode(prompter.tokens(wire.Raw("Once [user]"), None)) == "Once [user]"
    assert prompter.tokens(wire.Raw(""), None) == [tokenizer.bos_token_id]


def test_what_a_template_does_not_take_is_refused_in_words(tmp_path: Path) -> None:
    prompter, _ = a_prompter(tmp_path, TEMPLATE)
    with pytest.raises(PromptError, match="no robots"):
        prompter.tokens(wire.Chat((wire.Message("robot", "beep"),)), None)
    with pytest.raises(PromptError, match=r"voice: expected one of .* got 'nobody'"):
        prompter.tokens(wire.Words(("a",)), "nobody")


def test_an_asks_own_settings_come_before_the_voices_and_those_before_the_defaults(tmp_path: Path) -> None:
    prompter, _ = a_prompter(tmp_path, TEMPLATE)
    voice = read_voices().voices[read_voices().default]
    ask = wire.Ask("s", wire.Words(("a",)), 5, wire.Settings(temperature=0.0))
    drawn = prompter.sampling(ask)
    assert (drawn.temperature, drawn.top_k, drawn.seed) == (0.0, voice.top_k, 5)
    raw = prompter.sampling(wire.Ask("s", wire.Raw("a"), 5))
    assert raw == Sampling(**{**DEFAULTS._asdict(), "seed": 5})


def test_words_that_the_vocabulary_lacks_are_named(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "dragon": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")  # type: ignore[no-untyped-call]
    prompter = Prompter(tokenizer, read_voices())
    assert prompter.unknown_words(wire.Words(("dragon", "zeppelin"))) == ["zeppelin"]
    bytes_know_all, _ = a_prompter(tmp_path, None)
    assert bytes_know_all.unknown_words(wire.Words(("zeppelin", "ドラゴン"))) == []


def test_there_are_at_least_four_voices_each_with_an_opening() -> None:
    voices = read_voices().voices
    assert len(voices) >= 4
    assert len({voice.opening for voice in voices.values()}) == len(voices)
    assert all(voice.opening and voice.name and voice.manner for voice in voices.values())
