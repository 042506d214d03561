"""The same bits on every kind of processor: the engine told to do without AVX-512 writes what it writes with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import Family
from tests.processes import ROOT

SCRIPT = """
import hashlib, sys
from pathlib import Path
from storyteller import lanes
from storyteller.model import Model
from storyteller.story import Chunk, Sampling, numbers
model = Model.load(sys.argv[1], "int8", 1, Path(sys.argv[2]), lambda line: None)
model.allocate(4)
prompt = numbers(range(50))
model.step([Chunk(prompt, 0, numbers(range(4)), Sampling(), prompt)])
print(lanes.describe(), hashlib.sha256(model._workers[0]._logits.tobytes()).hexdigest())
"""

READY = """
import sys
from pathlib import Path
from storyteller import kernels
from storyteller.model import Model
from tests.engine.test_same_bits import crowd_of
from tests.engine.writing import write
model = Model.load(sys.argv[1], "int8", 2, Path(sys.argv[2]), lambda line: None)
model.allocate(256)
model.warm_up()
assert len(kernels.write.signatures) == 1
write(model, crowd_of(8, model.vocab_size))
assert len(kernels.write.signatures) == 1, kernels.write.signatures
"""

HASWELL = "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+movbe"


def logits_on(folder: Path, cache: Path, **environment: str) -> tuple[str, str]:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(cache)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=110,
    ).stdout  # fmt: skip
    kind, _, digest = told.strip().rpartition(" ")
    return kind, digest


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
def test_int8_logits_have_the_same_bits_without_avx512(checkpoints: dict[Family, Path], tmp_path: Path) -> None:
    folder = checkpoints["llama_grouped"]
    _, native = logits_on(folder, tmp_path)
    kind, older = logits_on(folder, tmp_path, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=HASWELL)
    assert kind == "AVX2"
    assert older == native


def test_after_the_warm_up_no_step_waits_for_the_compiler(checkpoints: dict[Family, Path], tmp_path: Path) -> None:
    """Whatever a step holds: one row or many, with a repetition penalty or without."""
    command = [sys.executable, "-c", READY, str(checkpoints["gpt2"]), str(tmp_path)]
    subprocess.run(command, check=True, timeout=110, cwd=ROOT)
