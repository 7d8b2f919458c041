"""SwiGLU without its matrices on the GPU: gate / (1 + exp(-gate)) * up, element by element in float32, rounded once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "gate and up of one shape, both bfloat16 or both float32"


@triton.jit(do_not_specialize=["count"])
def _swiglu(gate_ptr, up_ptr, y_ptr, count: tl.int64, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    gate = tl.load(gate_ptr + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=mask)


def _constants(t: Tile) -> dict[str, Any]:
    return {"BLOCK": t.block_n}


@torch.library.custom_op("miles_spmd::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two tensors of one shape -> the same shape."""
    y = _like(gate, up)
    check("swiglu", gate, up)
    t = tile("swiglu", gate.dtype, 1, 1, arch_of(gate))
    count = gate.numel()
    if count:
        _swiglu[(triton.cdiv(count, t.block_n),)](gate, up, y, count, **_constants(t), num_warps=t.warps, num_stages=t.stages)
    return y


@swiglu.register_fake
def _like(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    require("swiglu", gate.shape == up.shape and gate.dtype in DTYPES and up.dtype is gate.dtype, SUPPORTED, gate, up)
    return torch.empty_like(gate)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """One variant serves every shape."""
    t = tile("swiglu", dtype, 1, 1, arch)
    signature = {**dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), "*" + DTYPES[dtype]), "count": "i64", "BLOCK": "constexpr"}
    return [Spec("any shape", _swiglu, signature, _constants(t), t.warps, t.stages, dtype)]
