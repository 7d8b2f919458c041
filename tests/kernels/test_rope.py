"""kernels.rope: float64 reference, gradient, invariance. Run: pytest tests/kernels/test_rope.py"""

import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.rope import rope


def angles(tokens: int, head_dim: int) -> torch.Tensor:
    return torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (5, 3, 8), (70, 9, 64), (11, 2, 40), (4, 1, 24)])
def test_forward_and_gradient_match_rotation_by_complex_numbers(impl, tokens, heads, head_dim):
    x = torch.randn(tokens, heads, head_dim, requires_grad=True)
    angle = angles(tokens, head_dim)
    (wide,) = doubles(x)
    first, second = wide.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]
    reference = torch.cat([turned.real, turned.imag], -1)
    y = rope(x, angle.cos(), angle.sin())
    torch.testing.assert_close(y.double(), reference, rtol=0, atol=2e-6)
    cotangent = torch.randn(x.shape)
    (grad,), (expected,) = gradients(y, [x], cotangent), gradients(reference, [wide], cotangent)
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_dim", [24, 64])
def test_bits_do_not_depend_on_the_batch(impl, head_dim):
    angle = angles(70, head_dim)
    assert_row_invariant(rope, torch.randn(70, 3, head_dim), angle.cos(), angle.sin())
