"""Linear layer on the GPU: y = x W^T + b in one Triton kernel whose tiles do not depend on the number of rows.

An output is summed by one program over k in order, block by block, in float32, and rounded once: no split of k, no atomics. A row of zeros
beside it, or another row, uses other lanes of the same instructions, so the bits of a row do not depend on its neighbours.

Legend: M rows, K inputs, N outputs; capitals as suffixes are the block's share of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

BAND = 8  # row blocks that walk over the outputs together, so that a block of the weight is read from L2 by all of them
SUPPORTED = "x [M, K], weight [N, K], bias [N] or None, all bfloat16 or all float32, K and N at least 1"


@triton.jit
def banded(blocks_m: tl.tensor, blocks_n: tl.constexpr, ROWS_PER_BAND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The tile that a program has: its row block and its column block. The order decides the speed only."""
    band, place = tl.program_id(0) // (ROWS_PER_BAND * blocks_n), tl.program_id(0) % (ROWS_PER_BAND * blocks_n)
    height = tl.minimum(blocks_m - band * ROWS_PER_BAND, ROWS_PER_BAND)
    return band * ROWS_PER_BAND + place % height, place // height


@triton.jit
def multiply(
    x_MK: tl.tensor,
    weight_KN: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Float32 sums of a tile over k in order, from pointers to its first blocks. STRIDE: elements from one k to the next in the weight."""
    total_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x, weight = tl.load(x_MK + start), tl.load(weight_KN + start * STRIDE)
        else:  # terms past the end are 0 on both sides: what stands in memory there may be NaN
            x = tl.load(x_MK + start, mask=k[None, :] < K - start, other=0.0)
            weight = tl.load(weight_KN + start * STRIDE, mask=k[:, None] < K - start, other=0.0)
        total_MN = tl.dot(x, weight, total_MN, input_precision="ieee")
    return total_MN


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_PER_BAND: tl.constexpr,
):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block_m, block_n = banded(tl.cdiv(M, BLOCK_M), blocks_n, ROWS_PER_BAND)
    m, n, k = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)

    # Rows and outputs past the end read the last one instead of a mask: their results are never stored.
    x_MK = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    weight_KN = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    total_MN = multiply(x_MK, weight_KN, k, K, 1, BLOCK_M, BLOCK_N, BLOCK_K)
    if BIAS:
        total_MN += tl.load(bias_ptr + tl.minimum(n, N - 1)).to(tl.float32)[None, :]
    y_MN = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_MN, total_MN.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _constants(num_out: int, num_in: int, bias: bool, t: Tile) -> dict[str, Any]:
    blocks = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "ROWS_PER_BAND": BAND}
    return {"N": num_out, "K": num_in, "BIAS": bias, **blocks}


@torch.library.custom_op("miles_spmd::linear", mutates_args=())
def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, wide: bool = False) -> torch.Tensor:
    """[M, K], [N, K], [N] or None -> [M, N] in the dtype of x, summed in float32. `wide`: the float32 sums themselves."""
    y_MN = _empty(x_MK, weight_NK, bias_N, wide)
    check("linear", x_MK, weight_NK, bias_N)
    (num_rows, num_out), num_in = y_MN.shape, x_MK.shape[1]
    t = tile("linear", x_MK.dtype, num_in, num_out, arch_of(x_MK))
    programs = triton.cdiv(num_rows, t.block_m) * triton.cdiv(num_out, t.block_n)
    if programs:
        _linear[(programs,)](
            x_MK,
            weight_NK,
            weight_NK if bias_N is None else bias_N,  # any pointer of that type: it is not read
            y_MN,
            num_rows,
            **_constants(num_out, num_in, bias_N is not None, t),
            num_warps=t.warps,
            num_stages=t.stages,
        )
    return y_MN


@linear.register_fake
def _empty(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, wide: bool = False) -> torch.Tensor:
    present = [x for x in (x_MK, weight_NK, bias_N) if x is not None]
    fits = x_MK.ndim == weight_NK.ndim == 2 and x_MK.shape[1] == weight_NK.shape[1] and min(weight_NK.shape) > 0
    fits = fits and (bias_N is None or bias_N.shape == weight_NK.shape[:1])
    same = x_MK.dtype in DTYPES and all(x.dtype is x_MK.dtype for x in present)
    require("linear", fits and same, SUPPORTED, *present)
    return x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0], dtype=torch.float32 if wide else x_MK.dtype)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """A layer of a large model, the vocabulary of a small one with float32 logits, and sizes that divide nothing, with a bias."""
    variants = []
    for num_out, num_in, bias, wide in ((4096, 4096, False, False), (151936, 896, False, True), (33, 100, True, False)):
        t = tile("linear", dtype, num_in, num_out, arch)
        constants = _constants(num_out, num_in, bias, t)
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*" + DTYPES[dtype])
        if wide:
            pointers["y_ptr"] = "*fp32"
        signature = {**pointers, "M": "i32", **dict.fromkeys(constants, "constexpr")}
        label = f"[M, {num_in}] x [{num_out}, {num_in}]" + " + bias" * bias + " -> float32" * wide
        variants.append(Spec(label, _linear, signature, constants, t.warps, t.stages, dtype, dot=True))
    return variants
