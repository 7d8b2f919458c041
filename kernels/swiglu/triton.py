"""SwiGLU without its matrices on the GPU: gate / (1 + exp(-gate)) * up, element by element in float32, rounded once.

The tensors are taken as rows of their last dimension, whose width is a constant of the compiled code: with one flat count instead, which
may be anything, the compiler cannot prove that eight neighbours are all inside, and reads them one by one.

Legend: M rows, N columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "gate and up of one shape [..., N], both bfloat16 or both float32"


@triton.jit(do_not_specialize=["M"])
def _swiglu(gate_ptr, up_ptr, y_ptr, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    place_MN = m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    gate = tl.load(gate_ptr + place_MN, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place_MN, mask=mask, other=0.0).to(tl.float32)
    y_MN = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + place_MN, y_MN.to(y_ptr.dtype.element_ty), mask=mask)


def _constants(width: int, t: Tile) -> dict[str, Any]:
    return {"N": width, "BLOCK_M": t.block_m, "BLOCK_N": t.block_n}


@torch.library.custom_op("miles_spmd::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two tensors of one shape -> the same shape."""
    y = _like(gate, up)
    check("swiglu", gate, up)
    if gate.numel():
        width = gate.shape[-1]
        num_rows = gate.numel() // width
        t = tile("swiglu", gate.dtype, 1, width, arch_of(gate))
        grid = (triton.cdiv(num_rows, t.block_m) * triton.cdiv(width, t.block_n),)
        _swiglu[grid](gate, up, y, num_rows, **_constants(width, t), num_warps=t.warps, num_stages=t.stages)
    return y


@swiglu.register_fake
def _like(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    fits = gate.ndim > 0 and gate.shape == up.shape
    require("swiglu", fits and gate.dtype in DTYPES and up.dtype is gate.dtype, SUPPORTED, gate, up)
    return torch.empty_like(gate)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """A width that whole blocks cover, and one that divides nothing."""
    variants = []
    for width in (4864, 100):
        t = tile("swiglu", dtype, 1, width, arch)
        constants = _constants(width, t)
        pointers = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), "*" + DTYPES[dtype])
        signature = {**pointers, "M": "i32", **dict.fromkeys(constants, "constexpr")}
        variants.append(Spec(f"[M, {width}]", _swiglu, signature, constants, t.warps, t.stages, dtype))
    return variants
