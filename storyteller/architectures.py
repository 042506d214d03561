"""The families of models that the engine can run, and where each keeps its weights.

A family is one small adapter from a loaded transformers model to `Shape` and `Layer`: GPT-2 (learned positions,
LayerNorm), GPT-NeoX (partial rotary, attention and MLP side by side), Llama (RMSNorm, rotary, grouped keys, gated MLP;
Mistral and Qwen2 have the same shape). Whatever cannot be run exactly is refused with `ModelError`.

It imports neither torch nor transformers: it is handed a model and reads its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from storyteller.quantize import Floats

SUPPORTED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2")
CURVES = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu": "gelu", "silu": "silu", "swish": "silu", "relu": "relu",
}  # fmt: skip


class ModelError(ValueError):
    """A model cannot be loaded; the message is one line: what was expected and what came."""


class Linear(NamedTuple):
    weight: Floats  # [outputs, inputs]
    bias: Floats | None


class Norm(NamedTuple):
    weight: Floats
    bias: Floats | None


@dataclass(frozen=True)
class Layer:
    norm1: Norm
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    norm2: Norm
    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    inner: int  # of the MLP
    vocabulary: int
    window: int
    rotary: int
    activation: str  # a value of CURVES
    norm: str  # "layer" or "rms"
    eps: float
    parallel: bool = False
    scales: list[float] = field(default_factory=list)  # of the attention's scores, one a layer


@dataclass(frozen=True)
class Parts:
    """A model taken apart; `layer` reads one layer at a time, so that only one is held twice."""

    shape: Shape
    layer: Callable[[int], Layer]
    final: Norm
    embedding: Floats  # [vocabulary, hidden]
    head: Linear
    positions: Floats | None  # [window, hidden]
    inverse_frequencies: Floats | None  # [rotary / 2]
    rotary_scale: float


def _array(tensor: Any) -> Floats:
    return np.asarray(tensor.detach().float().numpy(), np.float32)


def _linear(module: Any) -> Linear:
    return Linear(_array(module.weight), None if module.bias is None else _array(module.bias))


def _norm(module: Any) -> Norm:
    bias = getattr(module, "bias", None)
    return Norm(_array(module.weight), None if bias is None else _array(bias))


def _curve(name: str) -> str:
    if name not in CURVES:
        raise ModelError(f"expected an activation out of {', '.join(sorted(CURVES))}, this model has {name}")
    return CURVES[name]


def check_family(family: str) -> None:
    """Raises `ModelError` for a family that the engine does not have."""
    if family not in SUPPORTED:
        raise ModelError(f"expected a model of a family out of {', '.join(SUPPORTED)}, this one is {family!r}")


def take_apart(model: Any) -> Parts:
    """The weights of a loaded causal language model.

    Raises:
        ModelError: for a family, activation or rotary embedding that the engine does not have.
    """
    family = model.config.model_type
    check_family(family)
    if family == "gpt2":
        return _gpt2(model)
    return _gpt_neox(model) if family == "gpt_neox" else _llama(model)


def _gpt2(model: Any) -> Parts:
    config, body = model.config, model.transformer
    dim = config.n_embd // config.n_head
    scale = dim**-0.5 if config.scale_attn_weights else 1.0
    inverse = config.scale_attn_by_inverse_layer_idx
    shape = Shape(
        layers=config.n_layer, hidden=config.n_embd, heads=config.n_head, kv_heads=config.n_head, dim=dim,
        inner=config.n_inner or 4 * config.n_embd, vocabulary=config.vocab_size, window=config.n_positions, rotary=0,
        activation=_curve(config.activation_function), norm="layer", eps=config.layer_norm_epsilon,
        scales=[scale / (i + 1) if inverse else scale for i in range(config.n_layer)],
    )  # fmt: skip

    def conv(module: Any) -> Linear:
        return Linear(_array(module.weight).T, _array(module.bias))

    def layer(i: int) -> Layer:
        block = body.h[i]
        weights, biases = conv(block.attn.c_attn)
        assert biases is not None
        q, k, v = (Linear(w, b) for w, b in zip(np.split(weights, 3), np.split(biases, 3), strict=True))
        return Layer(_norm(block.ln_1), q, k, v, conv(block.attn.c_proj), _norm(block.ln_2), None,
                     conv(block.mlp.c_fc), conv(block.mlp.c_proj))  # fmt: skip

    head = _linear(model.get_output_embeddings())
    return Parts(shape, layer, _norm(body.ln_f), _array(body.wte.weight), head, _array(body.wpe.weight), None, 1.0)


def _rotary(body: Any) -> tuple[Floats, float]:
    module = body.rotary_emb
    kind = getattr(module, "rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(f"expected a rotary embedding out of default, linear, llama3, yarn, this model has {kind!r}")
    return _array(module.inv_freq), float(getattr(module, "attention_scaling", 1.0))


def _gpt_neox(model: Any) -> Parts:
    config, body = model.config, model.gpt_neox
    dim = config.hidden_size // config.num_attention_heads
    frequencies, scale = _rotary(body)
    shape = Shape(
        layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads, dim=dim, inner=config.intermediate_size, vocabulary=config.vocab_size,
        window=config.max_position_embeddings, rotary=2 * frequencies.size, activation=_curve(config.hidden_act),
        norm="layer", eps=config.layer_norm_eps, parallel=bool(config.use_parallel_residual),
        scales=[dim**-0.5] * config.num_hidden_layers,
    )  # fmt: skip

    def layer(i: int) -> Layer:
        block = body.layers[i]
        weight, bias = _linear(block.attention.query_key_value)
        split = weight.reshape(shape.heads, 3, dim, -1)  # head by head: its queries, keys, values
        biases = None if bias is None else bias.reshape(shape.heads, 3, dim)
        q, k, v = (
            Linear(split[:, part].reshape(shape.hidden, -1), None if biases is None else biases[:, part].reshape(-1))
            for part in range(3)
        )
        return Layer(_norm(block.input_layernorm), q, k, v, _linear(block.attention.dense),
                     _norm(block.post_attention_layernorm), None, _linear(block.mlp.dense_h_to_4h),
                     _linear(block.mlp.dense_4h_to_h))  # fmt: skip

    head = _linear(model.get_output_embeddings())
    return Parts(
        shape, layer, _norm(body.final_layer_norm), _array(body.embed_in.weight), head, None, frequencies, scale
    )


def _llama(model: Any) -> Parts:
    config, body = model.config, model.model
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, scale = _rotary(body)
    window = config.max_position_embeddings
    sliding = getattr(config, "sliding_window", None)
    if sliding and getattr(config, "use_sliding_window", True):
        window = min(window, sliding)  # within it, a sliding window changes nothing
    shape = Shape(
        layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, dim=dim, inner=config.intermediate_size, vocabulary=config.vocab_size,
        window=window, rotary=2 * frequencies.size, activation=_curve(config.hidden_act), norm="rms",
        eps=config.rms_norm_eps, scales=[dim**-0.5] * config.num_hidden_layers,
    )  # fmt: skip

    def layer(i: int) -> Layer:
        block = body.layers[i]
        attention, mlp = block.self_attn, block.mlp
        q, k, v, out = (_linear(getattr(attention, f"{name}_proj")) for name in ("q", "k", "v", "o"))
        return Layer(_norm(block.input_layernorm), q, k, v, out, _norm(block.post_attention_layernorm),
                     _linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj))  # fmt: skip

    head = _linear(model.get_output_embeddings())
    return Parts(shape, layer, _norm(body.norm), _array(body.embed_tokens.weight), head, None, frequencies, scale)
