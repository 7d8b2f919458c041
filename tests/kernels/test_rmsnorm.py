"""kernels.rmsnorm: float64 reference, gradients, invariance. Run: pytest tests/kernels/test_rmsnorm.py"""

import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.rmsnorm import rmsnorm, rmsnorm_residual


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 24), (70, 64), (4, 3, 40), (2, 576), (9, 1000)])
def test_forward_and_gradients_match_float64(impl, shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    wide_x, wide_weight = wide = doubles(x, weight)
    reference = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + 1e-5) * wide_weight
    y = rmsnorm(x, weight, 1e-5)
    torch.testing.assert_close(y.double(), reference, rtol=2e-6, atol=1e-6)
    cotangent = torch.randn(shape)
    for grad, expected in zip(gradients(y, [x, weight], cotangent), gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [5, 24, 64, 576])
def test_bits_do_not_depend_on_the_batch(impl, width):
    weight = torch.randn(width)
    assert_row_invariant(lambda x: rmsnorm(x, weight, 1e-6), torch.randn(70, width))


def test_strided_input(impl):
    x, weight = torch.randn(12, 9).t(), torch.randn(12)
    assert torch.equal(rmsnorm(x, weight, 1e-6), rmsnorm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 24), (70, 64), (4, 3, 40), (2, 576), (9, 1000)])
def test_residual_has_the_bits_of_adding_first(impl, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    y, total = rmsnorm_residual(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(y, rmsnorm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=str)
def test_residual_gradients_are_those_of_adding_first(impl, used):
    """Whichever of the two outputs is used. Float64, for what plain autograd says."""
    inputs = [torch.randn(9, 24, requires_grad=True), torch.randn(9, 24, requires_grad=True), torch.randn(24, requires_grad=True)]
    wide = doubles(*inputs)
    sum_wide = wide[0] + wide[1]
    normed_wide = sum_wide * torch.rsqrt(sum_wide.square().mean(-1, keepdim=True) + 1e-5) * wide[2]
    cotangents = torch.randn(2, 9, 24)

    def grads(pair, leaves):
        value = sum((y * weight).sum() for y, weight, use in zip(pair, cotangents, used, strict=True) if use)
        return torch.autograd.grad(value, leaves, materialize_grads=True)

    for grad, expected in zip(grads(rmsnorm_residual(*inputs, 1e-5), inputs), grads((normed_wide, sum_wide), wide), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [5, 24, 64, 576])
def test_residual_bits_do_not_depend_on_the_batch(impl, width):
    weight = torch.randn(width)
    for part in range(2):
        assert_row_invariant(lambda *rows, part=part: rmsnorm_residual(*rows, weight, 1e-6)[part], *torch.randn(2, 70, width))


def test_residual_strided_or_of_no_rows(impl):
    x, residual, weight = torch.randn(12, 9).t(), torch.randn(9, 24)[:, ::2], torch.randn(12)
    for one, other in zip(
        rmsnorm_residual(x, residual, weight, 1e-6), rmsnorm_residual(x.clone(), residual.clone(), weight, 1e-6), strict=True
    ):
        assert torch.equal(one, other)
    assert all(y.shape == (0, 12) for y in rmsnorm_residual(x[:0], residual[:0], weight, 1e-6))
    with pytest.raises(AssertionError):
        rmsnorm_residual(x, residual[:1], weight, 1e-6)
