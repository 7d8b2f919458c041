"""kernels.rmsnorm: float64 reference, gradients, invariance. Run: pytest tests/kernels/test_rmsnorm.py"""

import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.rmsnorm import rmsnorm


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
