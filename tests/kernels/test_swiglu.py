"""kernels.swiglu: float64 reference, gradients, the library's exp, vector tails. Run: pytest tests/kernels/test_swiglu.py"""

import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.swiglu import swiglu


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 256), (70, 33), (2, 3, 40)])
def test_forward_and_gradients_match_float64(impl, shape):
    gate, up = (3 * torch.randn(shape)).requires_grad_(), torch.randn(shape, requires_grad=True)
    wide = doubles(gate, up)
    reference = torch.nn.functional.silu(wide[0]) * wide[1]
    y = swiglu(gate, up)
    torch.testing.assert_close(y.double(), reference, rtol=1e-6, atol=1e-7)
    cotangent = torch.randn(shape)
    for grad, expected in zip(gradients(y, [gate, up], cotangent), gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_accuracy_over_the_whole_range(impl):
    """Within 4 units in the last place wherever the result is a normal number; the limits at both ends; NaN stays NaN."""
    gate = torch.linspace(-87, 120, 300_001)
    y = swiglu(gate, torch.ones_like(gate)).double()
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    normal = exact.abs() > 2.0**-126
    assert ((y - exact).abs()[normal] <= 4 * 2.0**-24 * exact.abs()[normal]).all()
    ends = swiglu(torch.tensor([-1e30, -200.0, 0.0, 200.0, 2.0**100, torch.nan]), torch.ones(6))
    assert ends[:5].tolist() == [0.0, 0.0, 0.0, 200.0, 2.0**100] and ends[5].isnan()


@pytest.mark.parametrize("width", [1, 7, 15, 16, 17, 100])
def test_tails_have_the_bits_of_the_body(impl, width):
    values = torch.randn(64)
    for lane in range(width):
        gate, up = torch.zeros(3, width), torch.ones(3, width)
        gate[1, lane] = values[lane % 64]
        expected = swiglu(values[lane % 64].expand(16), torch.ones(16))[0]
        assert torch.equal(swiglu(gate, up)[1, lane], expected), lane
    assert_row_invariant(swiglu, torch.randn(70, width), torch.randn(70, width))
