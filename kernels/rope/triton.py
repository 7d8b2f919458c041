"""Rotary position embedding on the GPU: dimension j turns with dimension j + H / 2, in float32, rounded once.

Legend: T tokens, N heads, H a head's width, J = H / 2; R = T * N rows, R // N is the token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "x [T, N, H] bfloat16 or float32, cos and sin float32 [T, H / 2], H a multiple of 16 from 16 to 256"


@triton.jit(do_not_specialize=["R"])
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    R,
    N: tl.constexpr,
    J: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_J)
    mask = (r < R)[:, None] & (j < J)[None, :]
    angle_RJ = (r // N).to(tl.int64)[:, None] * J + j[None, :]
    first_RJ = r.to(tl.int64)[:, None] * (2 * J) + j[None, :]
    cos, sin = tl.load(cos_ptr + angle_RJ, mask=mask), tl.load(sin_ptr + angle_RJ, mask=mask)
    if BACKWARDS:
        sin = -sin
    first = tl.load(x_ptr + first_RJ, mask=mask).to(tl.float32)
    second = tl.load(x_ptr + first_RJ + J, mask=mask).to(tl.float32)
    tl.store(y_ptr + first_RJ, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + first_RJ + J, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)


def _constants(num_heads: int, half: int, backwards: bool, t: Tile) -> dict[str, Any]:
    return {"N": num_heads, "J": half, "BACKWARDS": backwards, "BLOCK_R": t.block_m, "BLOCK_J": t.block_n}


@torch.library.custom_op("miles_spmd::rope", mutates_args=())
def rope(x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    """[T, N, H], cos and sin float32 [T, H / 2] -> [T, N, H]. `backwards` turns by the opposite angle, which is the gradient."""
    y_TNH = _like(x_TNH, cos_TJ, sin_TJ, backwards)
    check("rope", x_TNH, cos_TJ, sin_TJ)
    num_tokens, num_heads, head_dim = x_TNH.shape
    t = tile("rope", x_TNH.dtype, 1, head_dim // 2, arch_of(x_TNH))
    num_rows = num_tokens * num_heads
    if num_rows:
        constants = _constants(num_heads, head_dim // 2, backwards, t)
        grid = (triton.cdiv(num_rows, t.block_m),)
        _rope[grid](x_TNH, cos_TJ, sin_TJ, y_TNH, num_rows, **constants, num_warps=t.warps, num_stages=t.stages)
    return y_TNH


@rope.register_fake
def _like(x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    fits = x_TNH.ndim == 3 and x_TNH.shape[2] % 16 == 0 and 16 <= x_TNH.shape[2] <= 256
    fits = fits and cos_TJ.shape == sin_TJ.shape == (x_TNH.shape[0], x_TNH.shape[2] // 2)
    same = x_TNH.dtype in DTYPES and cos_TJ.dtype is sin_TJ.dtype is torch.float32
    require("rope", fits and same, SUPPORTED, x_TNH, cos_TJ, sin_TJ)
    return torch.empty_like(x_TNH)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Heads of 128, and a width that is padded, backwards."""
    variants = []
    for num_heads, head_dim, backwards in ((32, 128, False), (3, 80, True)):
        t = tile("rope", dtype, 1, head_dim // 2, arch)
        constants = _constants(num_heads, head_dim // 2, backwards, t)
        x, angle = "*" + DTYPES[dtype], "*fp32"
        pointers = {"x_ptr": x, "cos_ptr": angle, "sin_ptr": angle, "y_ptr": x}
        signature = {**pointers, "R": "i32", **dict.fromkeys(constants, "constexpr")}
        label = f"[T, {num_heads}, {head_dim}]" + " backwards" * backwards
        variants.append(Spec(label, _rope, signature, constants, t.warps, t.stages, dtype))
    return variants
