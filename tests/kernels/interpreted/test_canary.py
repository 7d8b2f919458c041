"""The faults of Triton's interpreter that conftest.py stands in for. Run: pytest tests/kernels/interpreted/test_canary.py

When a test of the stock interpreter fails, that fault has been mended: delete its substitute in conftest.py, and the test.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from conftest import assert_near, assert_same_bits, exact_dot, interpreter, stock_cast, stock_dot


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_MK = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b_KN = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a_MK, b_KN, input_precision="ieee"))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.empty(len(a), b.shape[1])
    _dot[(1,)](a, b, c, len(a), b.shape[1], a.shape[1])
    return c


def test_new_memory_is_full_of_nan():
    assert all(torch.empty(5, dtype=dtype).isnan().all() for dtype in (torch.float32, torch.bfloat16))


def test_the_stock_dot_multiplies_the_bits_of_bfloat16(monkeypatch):
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", stock_dot)
    raw_a, raw_b = (x.view(torch.int16).numpy().view(np.uint16).astype(np.float32) for x in (a, b))
    assert torch.equal(dot(a, b), torch.from_numpy(raw_a @ raw_b))


def test_the_stock_dot_is_not_row_invariant_in_float32(monkeypatch):
    a, b = torch.randn(16, 64), torch.randn(64, 16)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", stock_dot)
    alone = torch.cat([dot(a[m : m + 1].clone(), b) for m in range(16)])
    assert not torch.equal(alone, dot(a, b))


def test_the_patched_dot_is_right_and_row_invariant():
    assert interpreter.InterpreterBuilder.create_dot is exact_dot
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 16).to(dtype)
        together = dot(a, b)
        assert_near(together, a.double() @ b.double(), 1e-5)
        assert_same_bits(torch.cat([dot(a[m : m + 1].clone(), b) for m in range(16)]), together)
        assert_same_bits(dot(a.roll(3, 0), b).roll(-3, 0), together)
        assert_same_bits(dot(a[:4].clone(), b), together[:4])


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + n).to(y_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty_like(x, dtype=dtype)
    _cast[(1,)](x, y, len(x))
    return y


def test_the_stock_cast_to_bfloat16_cuts_off(monkeypatch):
    x = torch.randn(4096)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", stock_cast)
    assert_same_bits(cast(x, torch.bfloat16), (x.view(torch.int32) & -65536).view(torch.float32).bfloat16())


def test_the_patched_cast_rounds_to_nearest():
    x = torch.cat([torch.randn(4093), torch.tensor([0.0, torch.inf, 1.0 + 2.0**-8])])
    assert_same_bits(cast(x, torch.bfloat16), x.bfloat16())
    assert_same_bits(cast(x.bfloat16(), torch.float32), x.bfloat16().float())
