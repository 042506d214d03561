"""Tiny checkpoints of every family, made once a run, and models loaded from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from storyteller.model import Model
from storyteller.story import BLOCK
from tests.checkpoints import FAMILIES, Family, make_checkpoint

Loader = Callable[..., Model]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def load(checkpoints: dict[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """A fresh model, with memory for `stories` whole windows."""
    cache = tmp_path_factory.mktemp("cache")

    def loaded(
        family: Family, quantize: Literal["int8", "none"] = "none", threads: int = 2, stories: int = 64
    ) -> Model:
        model = Model.load(str(checkpoints[family]), quantize, threads, cache, lambda line: None)
        model.allocate(stories * -(-model.window // BLOCK))
        return model

    return loaded
