"""kernels/linear/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_linear.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

from kernels.linear import triton as op
from kernels.linear.triton import linear

SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 64, 128), (65, 70, 200), (130, 24, 36)]  # rows, outputs, inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_float64(dtype, rows, outputs, inputs, with_bias):
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    reference = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # float32 sums: far below 2^-24 a term on average; then one rounding to the output's dtype.
    bound = 1e-6 * (x.double().abs() @ weight.double().abs().t() + 1) + EPSILON[dtype] * reference.abs()
    y = linear(x, weight, bias)
    assert y.dtype is dtype
    assert_near(y, reference, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(70, 24, 64), (29, 70, 99)])
def test_bits_do_not_depend_on_the_batch(dtype, rows, outputs, inputs):
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    assert_row_invariant(lambda x: linear(x, weight, bias), torch.randn(rows, inputs).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_order_of_the_tiles(dtype, monkeypatch):
    """More row blocks than a band holds, the last band not full: every tile is visited once."""
    x, weight = torch.randn(64 * 10 + 3, 16).to(dtype), torch.randn(130, 16).to(dtype)
    banded = linear(x, weight)
    monkeypatch.setattr(op, "BAND", 1)
    assert_same_bits(linear(x, weight), banded)
    assert_same_bits(linear(x[640:].clone(), weight), banded[640:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_that_are_not_numbers_stay_out(dtype):
    """A row of NaN or infinity reaches its own outputs only, and memory past the end of a weight reaches none."""
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(6, 40).to(dtype)
    clean = linear(x, weight)
    x[4], x[7] = torch.nan, torch.inf
    others = torch.tensor([0, 1, 2, 3, 5, 6, 8])
    assert_same_bits(linear(x, weight)[others], clean[others])
    padded = torch.cat([weight.flatten(), torch.full((1000,), torch.nan, dtype=dtype)])[: weight.numel()].view(6, 40)
    assert_same_bits(linear(x, padded)[others], clean[others])


def test_wide_results_are_the_sums_before_rounding():
    x, weight, bias = torch.randn(5, 40).bfloat16(), torch.randn(6, 40).bfloat16(), torch.randn(6).bfloat16()
    wide = linear(x, weight, bias, True)
    assert wide.dtype is torch.float32
    assert_near(wide, torch.nn.functional.linear(x.double(), weight.double(), bias.double()), 1e-4)
    assert_same_bits(wide.bfloat16(), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    assert linear(torch.empty(0, 8, dtype=dtype), torch.randn(3, 8).to(dtype)).shape == (0, 3)


def test_what_is_not_supported_is_named():
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    with pytest.raises(ValueError, match=r"linear: \[4, 8\] float32.*\[6, 9\].*supported: x \[M, K\]"):
        linear(x, torch.randn(6, 9))
    with pytest.raises(ValueError, match="all bfloat16 or all float32"):
        linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="all bfloat16 or all float32"):
        linear(x.half(), weight.half())
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, torch.randn(8))
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.randn(8, 4).t(), weight)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        linear(torch.randn(33)[1:].view(4, 8), weight)
