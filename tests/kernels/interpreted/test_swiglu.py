"""kernels/swiglu/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_swiglu.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

from kernels.swiglu.triton import swiglu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 3, 5), (33, 96), (2, 1024), (3, 1025), (1025,)])
def test_matches_float64(dtype, shape):
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    y = swiglu(gate, up)
    assert y.dtype is dtype and y.shape == shape
    assert_near(y, expected, (1e-6 + EPSILON[dtype]) * expected.abs() + 1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 96])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    assert_row_invariant(swiglu, torch.randn(70, width).to(dtype), torch.randn(70, width).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_are_a_line_and_a_zero(dtype):
    """exp(-gate) overflows below -88: the quotient is then 0, not NaN."""
    gate, up = torch.tensor([200.0, 90.0, -90.0, -200.0]).to(dtype), torch.ones(4).to(dtype)
    assert_same_bits(swiglu(gate, up).abs(), torch.tensor([200.0, 90.0, 0.0, 0.0]).to(dtype))


def test_nothing_and_what_is_not_supported():
    assert swiglu(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)
    with pytest.raises(ValueError, match=r"swiglu: \[4, 8\] float32.*\[4, 9\].*of one shape"):
        swiglu(torch.randn(4, 8), torch.randn(4, 9))
    with pytest.raises(ValueError, match="both bfloat16 or both float32"):
        swiglu(torch.randn(4, 8), torch.randn(4, 8).bfloat16())
    with pytest.raises(ValueError, match="contiguous"):
        swiglu(torch.randn(8, 8).t(), torch.randn(8, 8))
