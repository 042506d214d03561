"""A model comes from a folder, a .gguf file or the packaged one; anything else is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from storyteller.model import Model, ModelError
from tests.checkpoints import Family, make_checkpoint
from tests.engine.conftest import Loader


def refused(source: str, cache: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Model.load(source, "int8", 1, cache, lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message
    return message


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refused(str(tmp_path), tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused(str(tmp_path / "nowhere"), tmp_path)
    assert "nowhere.gguf" in refused("nowhere.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"something else")
    assert "GGUF" in refused(str(file), tmp_path)


def test_a_family_that_is_not_there_is_refused_by_name(checkpoints: dict[Family, Path], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bloom", "n_inner": None}))
    message = refused(str(tmp_path), tmp_path)
    assert "gpt2" in message
    assert "bloom" in message


def test_weights_that_are_missing_or_cut_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt2")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(str(tmp_path), tmp_path)
    weights.unlink()
    refused(str(tmp_path), tmp_path)


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt2")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "h.1.mlp.c_fc.weight" in refused(str(tmp_path), tmp_path)


def test_a_model_says_what_it_is(load: Loader, checkpoints: dict[Family, Path]) -> None:
    model = load("llama_grouped", "int8", stories=2)
    assert model.name == "llama_grouped"
    assert len(model.revision) == 12
    assert (model.window, model.vocab_size) == (256, len(model.tokenizer))
    assert model.end_ids == {0}
    heads = 2 * 2 * 2  # of all layers, keys and values
    assert model.kv_bytes_per_token == heads * (16 + 4)  # bytes and their scale
    assert load("llama_grouped", "none", stories=2).kv_bytes_per_token == heads * 16 * 4


def test_end_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "gpt2")
    for name in ("config.json", "generation_config.json"):
        facts = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**facts, "eos_token_id": [5, 10**6, -1]}))
    assert Model.load(str(folder), "int8", 1, tmp_path, lambda line: None).end_ids == {0, 5}
