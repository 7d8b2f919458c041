"""Linear layer with a weight for each expert on the GPU: the tiles of kernels/linear/triton.py, each within the rows of one expert.

How many row blocks the experts need is known on the GPU only, so there are as many programs as can be needed: every expert may have one
block that is not full. A program finds its expert and rows from the offsets, and the ones too many leave at once. The gradient of x is the
same kernel with the weight transposed; that of a weight is summed over its expert's rows in their order. No split sums, no atomics.

Legend: R rows of x, M rows in the order of their experts, D inputs, N outputs, E experts, K the summed dimension of a product; capitals as
suffixes are the block's share of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.linear.triton import BAND, banded, multiply
from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, power_of_two, require, tile

MAX_EXPERTS = 4096
_OFFSETS = f"offsets int32 [E + 1], rows int64 [M] or None, 1 <= E <= {MAX_EXPERTS}, D and N at least 1"
SUPPORTED = f"x [R, D] (transposed: [R, N]), weight [E, N, D], both bfloat16 or both float32, {_OFFSETS}"
SUPPORTED_BACKWARD = f"grad [M, N], x [R, D], both bfloat16 or both float32, {_OFFSETS}"


@triton.jit
def _expert_of(offsets_ptr, block, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert that row block number `block` belongs to, its first row, and the end of the expert's rows; 0, 0, 0 past the last block."""
    e = tl.arange(0, BLOCK_E)
    start_E = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end_E = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    blocks_E = (end_E - start_E + BLOCK_M - 1) // BLOCK_M
    first_E = tl.cumsum(blocks_E, 0) - blocks_E
    own_E = (block >= first_E) & (block < first_E + blocks_E)  # true of one, or of none
    first = tl.sum(tl.where(own_E, start_E + (block - first_E) * BLOCK_M, 0))
    return tl.sum(tl.where(own_E, e, 0)), first, tl.sum(tl.where(own_E, end_E, 0))


@triton.jit(do_not_specialize=["M"])
def _grouped_linear(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    rows_ptr,
    y_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    GATHERED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS_PER_BAND: tl.constexpr,
):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block_m, block_n = banded(tl.cdiv(M, BLOCK_M) + E, blocks_n, ROWS_PER_BAND)
    expert, first, end = _expert_of(offsets_ptr, block_m, E, BLOCK_M, BLOCK_E)
    if first < end:
        m, n, k = first + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        # Rows and outputs past the end read the last one instead of a mask: their results are never stored.
        row, column = tl.minimum(m, end - 1), tl.minimum(n, N - 1)
        if GATHERED:
            row = tl.load(rows_ptr + row)
        x_MK = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
        expert_ptr = weight_ptr + expert.to(tl.int64) * (N * K)
        if TRANSPOSED:  # the expert's weight is [K, N]
            total_MN = multiply(x_MK, expert_ptr + k[:, None] * N + column[None, :], k, K, N, BLOCK_M, BLOCK_N, BLOCK_K)
        else:  # [N, K]
            total_MN = multiply(x_MK, expert_ptr + column[None, :] * K + k[:, None], k, K, 1, BLOCK_M, BLOCK_N, BLOCK_K)
        y_MN = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(y_MN, total_MN.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])


@triton.jit
def _grouped_weight_grad(
    grad_ptr,
    x_ptr,
    offsets_ptr,
    rows_ptr,
    weight_grad_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks_d: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    expert, place = tl.program_id(0) // (blocks_n * blocks_d), tl.program_id(0) % (blocks_n * blocks_d)
    n, d = place // blocks_d * BLOCK_N + tl.arange(0, BLOCK_N), place % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    column_N, column_D = tl.minimum(n, N - 1), tl.minimum(d, D - 1)
    end = tl.load(offsets_ptr + expert + 1)
    total_ND = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        row = tl.load(rows_ptr + m, mask=m < end, other=0) if GATHERED else m
        # Rows past the end are 0 on both sides: there may be NaN in the next expert's.
        grad_NM = tl.load(grad_ptr + m[None, :] * N + column_N[:, None], mask=(m < end)[None, :], other=0.0)
        x_MD = tl.load(x_ptr + row[:, None] * D + column_D[None, :], mask=(m < end)[:, None], other=0.0)
        total_ND = tl.dot(grad_NM, x_MD, total_ND, input_precision="ieee")
    weight_ND = weight_grad_ptr + expert.to(tl.int64) * (N * D) + n[:, None] * D + d[None, :]
    tl.store(weight_ND, total_ND.to(weight_grad_ptr.dtype.element_ty), mask=(n < N)[:, None] & (d < D)[None, :])


def _constants(num_out: int, num_in: int, num_experts: int, gathered: bool, transposed: bool, t: Tile) -> dict[str, Any]:
    blocks = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "BLOCK_E": power_of_two(num_experts)}
    ways = {"GATHERED": gathered, "TRANSPOSED": transposed}
    return {"N": num_out, "K": num_in, "E": num_experts, **ways, **blocks, "ROWS_PER_BAND": BAND}


def _weight_grad_constants(num_out: int, num_in: int, gathered: bool, t: Tile) -> dict[str, Any]:
    blocks = {"BLOCK_N": t.block_m, "BLOCK_D": t.block_n, "BLOCK_M": t.block_k}  # rows are what is summed here
    return {"N": num_out, "D": num_in, "GATHERED": gathered, **blocks}


@torch.library.custom_op("miles_spmd::grouped_linear", mutates_args=())
def grouped_linear(
    x_RD: torch.Tensor, weight_END: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """[R, D], [E, N, D], int32 [E + 1], int64 [M] or None -> [M, N] in the dtype of x. `transposed`: [R, N] -> [M, D]."""
    y_MN = _outputs(x_RD, weight_END, offsets_E1, rows_M, transposed)
    check("grouped_linear", x_RD, weight_END, offsets_E1, rows_M)
    (num_rows, num_out), num_in, num_experts = y_MN.shape, x_RD.shape[1], weight_END.shape[0]
    t = tile("grouped_linear", x_RD.dtype, num_in, num_out, arch_of(x_RD))
    if num_rows:
        programs = (triton.cdiv(num_rows, t.block_m) + num_experts) * triton.cdiv(num_out, t.block_n)
        _grouped_linear[(programs,)](
            x_RD,
            weight_END,
            offsets_E1,
            _any_rows(rows_M, x_RD),
            y_MN,
            num_rows,
            **_constants(num_out, num_in, num_experts, rows_M is not None, transposed, t),
            num_warps=t.warps,
            num_stages=t.stages,
        )
    return y_MN


@grouped_linear.register_fake
def _outputs(
    x_RD: torch.Tensor, weight_END: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    fits = x_RD.ndim == 2 and weight_END.ndim == 3 and x_RD.shape[1] == weight_END.shape[1 if transposed else 2]
    fits = fits and min(weight_END.shape) > 0 and _fit(offsets_E1, rows_M, weight_END.shape[0])
    fits = fits and x_RD.dtype in DTYPES and weight_END.dtype is x_RD.dtype
    require("grouped_linear", fits, SUPPORTED, x_RD, weight_END, offsets_E1, rows_M)
    return x_RD.new_empty((x_RD if rows_M is None else rows_M).shape[0], weight_END.shape[2 if transposed else 1])


@torch.library.custom_op("miles_spmd::grouped_weight_grad", mutates_args=())
def grouped_weight_grad(grad_MN: torch.Tensor, x_RD: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None) -> torch.Tensor:
    """[M, N], [R, D], int32 [E + 1], int64 [M] or None -> [E, N, D]: for each expert the sum over its rows of grad[m] x[rows[m]]^T."""
    weight_grad_END = _weight_grad(grad_MN, x_RD, offsets_E1, rows_M)
    check("grouped_weight_grad", grad_MN, x_RD, offsets_E1, rows_M)
    num_experts, num_out, num_in = weight_grad_END.shape
    t = tile("grouped_linear", x_RD.dtype, num_out, num_in, arch_of(x_RD))
    programs = num_experts * triton.cdiv(num_out, t.block_m) * triton.cdiv(num_in, t.block_n)
    _grouped_weight_grad[(programs,)](
        grad_MN,
        x_RD,
        offsets_E1,
        _any_rows(rows_M, x_RD),
        weight_grad_END,
        **_weight_grad_constants(num_out, num_in, rows_M is not None, t),
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return weight_grad_END


@grouped_weight_grad.register_fake
def _weight_grad(grad_MN: torch.Tensor, x_RD: torch.Tensor, offsets_E1: torch.Tensor, rows_M: torch.Tensor | None) -> torch.Tensor:
    num_rows = (x_RD if rows_M is None else rows_M).shape[0]
    fits = grad_MN.ndim == x_RD.ndim == 2 and grad_MN.shape[0] == num_rows and min(grad_MN.shape[1], x_RD.shape[1]) > 0
    fits = fits and _fit(offsets_E1, rows_M, offsets_E1.shape[0] - 1) and x_RD.dtype in DTYPES and grad_MN.dtype is x_RD.dtype
    require("grouped_weight_grad", fits, SUPPORTED_BACKWARD, grad_MN, x_RD, offsets_E1, rows_M)
    return x_RD.new_empty(offsets_E1.shape[0] - 1, grad_MN.shape[1], x_RD.shape[1])


def _any_rows(rows_M: torch.Tensor | None, x_RD: torch.Tensor) -> torch.Tensor:
    """Without rows any pointer of that type: it is not read."""
    return x_RD.new_empty(0, dtype=torch.int64) if rows_M is None else rows_M


def _fit(offsets_E1: torch.Tensor, rows_M: torch.Tensor | None, num_experts: int) -> bool:
    fits = offsets_E1.shape == (num_experts + 1,) and offsets_E1.dtype is torch.int32 and 0 < num_experts <= MAX_EXPERTS
    return fits and (rows_M is None or (rows_M.ndim == 1 and rows_M.dtype is torch.int64))


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Gate and up, down, and the three gradients, of an expert of Qwen3-MoE (128 of 2048 x 768), and sizes that divide nothing."""
    variants, values = [], "*" + DTYPES[dtype]
    names = ("x_ptr", "weight_ptr", "offsets_ptr", "rows_ptr", "y_ptr")
    for num_out, num_in, num_experts, gathered, transposed in (
        (1536, 2048, 128, True, False),
        (2048, 768, 128, False, False),
        (2048, 1536, 128, False, True),
        (33, 100, 5, True, False),
    ):
        t = tile("grouped_linear", dtype, num_in, num_out, arch)
        constants = _constants(num_out, num_in, num_experts, gathered, transposed, t)
        pointers = dict(zip(names, (values, values, "*i32", "*i64", values), strict=True))
        signature = {**pointers, "M": "i32", **dict.fromkeys(constants, "constexpr")}
        weight = f"[{num_experts}, {num_in}, {num_out}] transposed" if transposed else f"[{num_experts}, {num_out}, {num_in}]"
        label = f"[M, {num_in}] x {weight}" + ", gathered" * gathered
        variants.append(Spec(label, _grouped_linear, signature, constants, t.warps, t.stages, dtype, dot=True))
    names = ("grad_ptr", "x_ptr", "offsets_ptr", "rows_ptr", "weight_grad_ptr")
    for num_out, num_in, gathered in ((1536, 2048, True), (33, 100, False)):
        t = tile("grouped_linear", dtype, num_out, num_in, arch)
        constants = _weight_grad_constants(num_out, num_in, gathered, t)
        pointers = dict(zip(names, (values, values, "*i32", "*i64", values), strict=True))
        signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
        label = f"weight gradient [{num_out}, {num_in}]" + ", gathered" * gathered
        variants.append(Spec(label, _grouped_weight_grad, signature, constants, t.warps, t.stages, dtype, dot=True))
    return variants
