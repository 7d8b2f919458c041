"""kernels/rmsnorm/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_rmsnorm.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

import kernels.rmsnorm as entry
from kernels.dispatch import triton_on_cpu
from kernels.rmsnorm.triton import rmsnorm, rmsnorm_residual

SHAPES = [(1, 1), (3, 7), (70, 64), (33, 40), (5, 576), (2, 4096), (3, 5000)]  # the last two are walked in blocks


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = reference(x, weight, 1e-5)
    y = rmsnorm(x, weight, 1e-5)
    assert y.dtype is dtype
    assert_near(y, expected, (2e-6 + EPSILON[dtype]) * expected.abs() + 1e-9)  # float32 arithmetic, then one rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_residual_is_added_first_and_rounded(dtype, shape):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y, total = rmsnorm_residual(x, residual, weight, 1e-6)
    assert_same_bits(total, x + residual)
    assert_same_bits(y, rmsnorm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(70, 24), (23, 576)])  # 64 rows a program, and 2
def test_bits_do_not_depend_on_the_batch(dtype, rows, width):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    assert_row_invariant(lambda x: rmsnorm(x, weight, 1e-6), x, chunks=(1, 3, 7, 20))
    assert_row_invariant(lambda *rows: rmsnorm_residual(*rows, weight, 1e-6), x, x.roll(1, 0), chunks=(7, 20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_numbers_are_not_lost(dtype):
    """The squares are taken in float32: in bfloat16 or float16 they would vanish beside eps, or under it."""
    x, weight = torch.full((2, 32), 1e-4).to(dtype), torch.ones(32).to(dtype)
    assert_near(rmsnorm(x, weight, 1e-12), reference(x, weight, 1e-12), 2 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_has_the_bits_of_adding_first_and_its_gradients(dtype):
    """The entry of the model (kernels.rmsnorm), any leading shape; in bfloat16 too the gradients are those of the two ops apart."""
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((3, 4, 40), (3, 4, 40), (40,))]
    cotangents = torch.randn(2, 3, 4, 40).to(dtype)
    x, residual, weight = inputs
    with triton_on_cpu():
        together = entry.rmsnorm_residual(x, residual, weight, 1e-6)
        total = x + residual
        apart = entry.rmsnorm(total, weight, 1e-6), total
        assert_same_bits(tuple(y.detach() for y in together), tuple(y.detach() for y in apart))
        grads = [torch.autograd.grad(pair, inputs, tuple(cotangents)) for pair in (together, apart)]
    assert_same_bits(*grads)


def test_no_rows_and_what_is_not_supported():
    assert rmsnorm(torch.empty(0, 8), torch.randn(8), 1e-6).shape == (0, 8)
    with pytest.raises(ValueError, match=r"rmsnorm: \[4, 8\] float32.*\[9\].*supported: x and residual \[M, D\]"):
        rmsnorm(torch.randn(4, 8), torch.randn(9), 1e-6)
    with pytest.raises(ValueError, match="rmsnorm_residual: .*all bfloat16 or all float32"):
        rmsnorm_residual(torch.randn(4, 8), torch.randn(4, 8).bfloat16(), torch.randn(8), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        rmsnorm(torch.randn(8, 4).t(), torch.randn(8), 1e-6)
