"""Sixteen numbers at a time: a small language for the few loops that a compiler does not vectorise by itself.

An emitter, decorated with `lanes`, is called from compiled code and becomes LLVM vector code in place. Arrays are
handed over as ``(array, offset)``, flat, without bounds checks: the callers own that.

It promises that an emitter gives the same bits whatever the width of the processor's registers: vectors have sixteen
lanes everywhere, sums are made lane by lane and folded in a fixed order, multiply-and-add is fused only where it says
so.

It does not know what a layer or a token is, and has no kernels of its own: see `tiles.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.core import config as untyped_config
from numba.core.registry import cpu_target
from numba.extending import intrinsic

cgutils: Any = untyped_cgutils
config: Any = untyped_config
LANES = 16


_SOURCES = (
    "lanes.py", "vectors.py", "tiles.py", "attention.py", "layout.py", "heads.py", "kernels.py", "ranking.py",
    "sampling.py",
)  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])


def _cache_folder() -> Path:
    """Where compiled code is kept: NUMBA_CACHE_DIR, or beside the sources; new sources get a new folder.

    numba looks only at the file of the function it compiles, not at what that file calls.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()[:12]
    return Path(config.CACHE_DIR or here / "__pycache__") / f"compiled-{digest}"


config.CACHE_DIR = str(_cache_folder())
uncached: list[str] = []
"""Functions whose compiled code cannot be kept on disk, because no folder is writable."""


def compiled(function: Function) -> Function:
    """Compiles at the first call, keeps the result on disk, and releases the interpreter lock while it runs."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # "cannot cache function: no locator available"
        uncached.append(function.__name__)
        return cast(Function, numba.njit(**options)(function))


Pointer = Any  # in an emitter's signature: an array and the offset behind it
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VF, VI, VB = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(ir.IntType(8), LANES)
_FEATURES = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
VNNI_512 = "+avx512vnni" in _FEATURES
VNNI_256 = not VNNI_512 and "+avxvnni" in _FEATURES
AVX2 = not VNNI_512 and not VNNI_256 and "+avx2" in _FEATURES
UNSIGNED = VNNI_512 or VNNI_256
"""Whether activations are stored with 128 added, as VNNI wants its first factor."""
TILE_ROWS, TILE_COLUMNS = (6, 64) if "+avx512f" in _FEATURES else (2, 32)


def describe() -> str:
    """How int8 products are made on this processor, for the log."""
    names = {"AVX-512 VNNI": VNNI_512, "AVX VNNI": VNNI_256, "AVX2": AVX2}
    return next((name for name, there in names.items() if there), "plain")


def _f32(value: float) -> float:
    """The nearest 32-bit float, as llvmlite wants its constants."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class Emit:
    """Writes vector instructions at the builder's place."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def at(self, pointer: Any, index: Any, kind: Any) -> Any:
        """Pointer to `kind`, `index` elements of the array behind."""
        return self.builder.bitcast(self.builder.gep(pointer, [index]), kind.as_pointer())

    def load(self, pointer: Any, index: Any, kind: Any = VF) -> Any:
        return self.builder.load(self.at(pointer, index, kind), align=1)

    def store(self, value: Any, pointer: Any, index: Any) -> None:
        self.builder.store(value, self.at(pointer, index, value.type), align=1)

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        kind = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def const(self, value: float) -> Any:
        return ir.Constant(VF, [_f32(value)] * LANES)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VF, a, b, c)

    def prefetch(self, pointer: Any, index: Any) -> None:
        """Asks for the cache line of an element that is wanted soon; any address will do."""
        where = self.builder.bitcast(self.builder.gep(pointer, [index]), ir.IntType(8).as_pointer())
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        self.builder.call(function, [where, I32(0), I32(2), I32(1)])

    def variable(self, value: Any) -> Any:
        return cgutils.alloca_once_value(self.builder, value)

    def index(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def halve(self, vector: Any, fold: Callable[[Any, Any], Any]) -> Any:
        """All lanes folded into one scalar, upper half onto lower half."""
        width = vector.type.count
        while width > 1:
            width //= 2
            parts = [
                self.builder.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(I32, width), [low + i for i in range(width)])
                )
                for low in (0, width)
            ]
            vector = fold(*parts)
        return self.builder.extract_element(vector, I32(0))

    def larger(self, a: Any, b: Any) -> Any:
        """Per lane the larger one; `b` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """e to the x within 2 units in the last place; 0 below -87, clamped above 88."""
        b = self.builder
        low = b.fcmp_ordered("<", x, self.const(-87.0))
        x = b.select(b.fcmp_ordered(">", x, self.const(88.0)), self.const(88.0), x)
        x = b.select(low, self.const(-87.0), x)
        n = self.call("llvm.rint.v16f32", VF, b.fmul(x, self.const(math.log2(math.e))))
        r = self.fma(n, self.const(-0.693359375), x)
        r = self.fma(n, self.const(2.12194440e-4), r)
        p = self.const(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.const(c))
        p = self.fma(p, b.fmul(r, r), b.fadd(r, self.const(1.0)))
        # a NaN must not become an integer: that would be undefined
        n = b.select(b.fcmp_ordered("==", n, n), n, self.const(0.0))
        power = b.shl(b.fptosi(n, VI), ir.Constant(VI, [23] * LANES))
        value = b.bitcast(b.add(b.bitcast(p, VI), power), VF)
        return b.select(low, self.const(0.0), value)

    def sigmoid(self, x: Any) -> Any:
        one = self.const(1.0)
        return self.builder.fdiv(one, self.builder.fadd(one, self.exp(self.builder.fneg(x))))

    def wide(self, pointer: Any, index: Any) -> Any:
        """Sixteen float32 numbers, or bfloat16 in uint16, as float32."""
        if not isinstance(pointer.type.pointee, ir.IntType):
            return self.load(pointer, index)
        half = self.load(pointer, index, ir.VectorType(ir.IntType(16), LANES))
        return self.builder.bitcast(self.builder.shl(self.builder.zext(half, VI), ir.Constant(VI, [16] * LANES)), VF)


def lanes(result: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Makes an emitter callable from compiled code: each array with the offset behind it arrives as one pointer."""

    def make(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *kinds: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values, rest = [], list(zip(signature.args, args, strict=True))
                while rest:
                    kind, value = rest.pop(0)
                    if isinstance(kind, types.Array):
                        data = context.make_array(kind)(context, builder, value).data
                        values.append(builder.gep(data, [rest.pop(0)[1]]))
                    else:
                        values.append(value)
                found = emit(Emit(builder), *values)
                return context.get_dummy_value() if found is None else found

            settled = [types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds]
            settled = [types.float32 if isinstance(kind, types.Float) else kind for kind in settled]
            return result(*settled), codegen

        names = ["typing_context"]
        for name, parameter in list(inspect.signature(emit).parameters.items())[1:]:
            names += [name, f"{name}_at"] if parameter.annotation == "Pointer" else [name]
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, positional) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = emit.__name__
        return intrinsic(typed)

    return make
