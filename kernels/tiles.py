"""The one table of tile shapes of the Triton kernels, and what their wrappers and the ahead-of-time compiler share.

A result's bits depend on the tile it was computed with, so a tile is a function of (op, dtype, K, N, architecture) and of nothing that
varies between calls: no autotuning, and the number of rows is not an argument. One compiled variant serves decode, prefill and training.

Legend: M rows, K the dimension that is summed (or a head's width), N columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # and their names in a Triton signature
ALIGNMENT = 16  # bytes: the kernels are compiled for pointers that are multiples of it
PAGE = 64  # keys in a page of the cache, which is one block of the softmax


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and summed terms of one step of one program; warps of a program; stages of the load pipeline."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Spec:
    """One compiled variant: what the JIT compiles when the wrapper launches `kernel`, written down so that no GPU is needed.

    `signature` names every parameter of the kernel in order: "*bf16", "*fp32", "i32", ..., or "constexpr" for those in `constants`.
    Pointers are taken to be aligned to 16 bytes, as the wrappers require; numbers must be in the kernel's `do_not_specialize`. `dot` says
    that the kernel multiplies matrices, so that a matrix instruction is expected in the result where there is one for `dtype`.
    """

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    dtype: torch.dtype
    dot: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # further compiler options that the wrapper passes


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n (n >= 1): Triton's blocks have such sides."""
    return 1 << (n - 1).bit_length()


def tile(op: str, dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """The tile of an op for a weight or row of this shape on this architecture, whatever the number of rows."""
    assert arch in ARCHES and dtype in DTYPES, (arch, dtype)
    return _TABLE[op](dtype, k, n, arch)


def _linear(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    if dtype is torch.float32:  # no matrix instruction takes float32 exactly: plain fused multiply-adds, 32 sums a thread
        return Tile(64, 64, 16, 4, 2)
    if arch == "gfx942":  # 64 KiB of local memory
        return Tile(64, 64, 64, 4, 2)
    # 64 rows are the least that wgmma and tcgen05 take. Narrow outputs get narrow tiles, so that decode still fills the processors.
    block_n = 128 if n >= 16384 else 64
    return Tile(64, block_n, 64, 4, 4)


def _rows(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """Ops that walk along a row of n: short rows share a program, long ones are walked in blocks.

    8 columns a thread: with 16, the assemblers of some triton versions keep a register in memory for the sake of occupancy.
    """
    block_n = min(power_of_two(n), 2048)
    return Tile(2048 // block_n, block_n, 1, 8, 1)


def _elements(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """Ops without sums: 2048 elements a program, 16 a thread."""
    block_n = min(power_of_two(n), 1024)
    return Tile(2048 // block_n, block_n, 1, 4, 1)


def _gather(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """block_k rows of the gradient are added at a time, in the order of their tokens."""
    return Tile(1, min(power_of_two(n), 1024), 16, 4, 1)


def _attention(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """k is the head's width. block_n is the page, block_k the padded width. Warps: as many as keep every register out of memory."""
    width = max(16, power_of_two(k))
    if dtype is torch.float32:
        return Tile(16, PAGE, width, 4 if arch == "gfx942" else 16 if width == 256 else 8, 1)
    block_m = 64 if arch in ("sm_90", "sm_100") else 16
    return Tile(block_m, PAGE, width, 8 if width == 256 else 4, 1 if arch == "gfx942" else 2)


def _experts(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    """Whole rows of router logits, as 64-bit keys: 8 a thread, or as many as a wide row needs."""
    block_n = power_of_two(n)
    return Tile(max(1, 1024 // block_n), block_n, 1, 4 if block_n <= 1024 else 8, 1)


def _ids(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    return Tile(1, 1024, 1, 4, 1)


def _vocabulary(dtype: torch.dtype, k: int, n: int, arch: str) -> Tile:
    return Tile(1, min(max(power_of_two(n), 64), 2048), 1, 8, 1)


_TABLE = {
    "linear": _linear,
    "rmsnorm": _rows,
    "rope": _elements,
    "swiglu": _elements,
    "embedding": _gather,
    "attention": _attention,
    "write_kv": _rows,
    "logprob": _vocabulary,
    "sample": _vocabulary,
    "router": _experts,
    "expert_order": _ids,
    "grouped_linear": _linear,
    "combine": _elements,
}


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1 before triton is imported)."""
    return triton.knobs.runtime.interpret


def arch_of(x: torch.Tensor) -> str:
    """The architecture that a tensor lives on. The interpreter stands in for sm_90, whose tiles it then proves."""
    return "sm_90" if interpreted() else _arch(x.device.index or 0)


@cache
def _arch(device: int) -> str:
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        arch = name if name in ARCHES else None
    else:
        major, minor = torch.cuda.get_device_capability(device)
        # 8.6 and 8.9 have the matrix instruction of 8.0, and so has 12.0; all have the 99 KiB of shared memory that its tiles keep to.
        name, arch = f"sm_{major}{minor}", {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}.get(major)
    if arch is None:
        raise ValueError(f"the Triton kernels have no tiles for {name}; supported: {', '.join(ARCHES)} and their kin")
    return arch


def require(op: str, ok: bool, supported: str, *tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless `ok`, naming the op, its tensors and what it supports. Looks at no memory, so it serves meta tensors too."""
    if not ok:
        raise ValueError(f"{op}: {_describe(*tensors)} is not supported; supported: {supported}")


def check(op: str, *tensors: torch.Tensor | None, supported: str = "", ok: bool = True) -> None:
    """`require`, and every tensor must be dense, aligned to 16 bytes and where the kernels run."""
    require(op, ok, supported, *tensors)
    device = "cpu" if interpreted() else "cuda"
    for x in tensors:
        if x is None:
            continue
        if x.device.type != device:
            raise ValueError(f"{op}: {_describe(x)}: the Triton kernels take CUDA tensors, or CPU tensors under TRITON_INTERPRET=1")
        if not x.is_contiguous():
            raise ValueError(f"{op}: {_describe(x)} with strides {x.stride()} is not supported; supported: contiguous tensors")
        if x.data_ptr() % ALIGNMENT:
            where = f"starts {x.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
            raise ValueError(f"{op}: {_describe(x)} {where}; supported: multiples of {ALIGNMENT} bytes (clone it)")


def _describe(*tensors: torch.Tensor | None) -> str:
    return ", ".join(f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}" for x in tensors if x is not None)
