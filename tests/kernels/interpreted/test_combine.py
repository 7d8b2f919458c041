"""kernels/combine/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_combine.py"""

import pytest
import torch
from conftest import DTYPES, EPSILON, assert_near, assert_row_invariant, assert_same_bits

from kernels import combine as entry
from kernels.combine import triton as op
from kernels.combine.triton import combine
from kernels.dispatch import triton_on_cpu


def inputs(tokens: int, slots: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    place = torch.randperm(tokens * slots).view(tokens, slots)
    return torch.randn(tokens * slots, width).to(dtype), torch.randn(tokens, slots), place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 1), (3, 2, 7), (20, 4, 33), (5, 8, 1100)])
def test_matches_float64(dtype, tokens, slots, width):
    y, weights, place = inputs(tokens, slots, width, dtype)
    terms = y.double()[place] * weights.double()[..., None]
    out = combine(y, weights, place)
    assert out.dtype is dtype
    assert_near(out, terms.sum(1), 1e-6 * terms.abs().sum(1) + EPSILON[dtype] * terms.sum(1).abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 96])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    """A token brings its own rows: wherever they stand, the same bits."""

    def rows_anywhere(rows_TKN: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        place = torch.randperm(weights.numel())
        y = torch.empty(weights.numel(), width, dtype=dtype)
        y[place] = rows_TKN.reshape(-1, width)
        return combine(y, weights, place.view_as(weights))

    assert_row_invariant(rows_anywhere, torch.randn(70, 3, width).to(dtype), torch.randn(70, 3))


def test_one_slot_is_one_product():
    y, weights, place = inputs(9, 1, 20, torch.bfloat16)
    assert_same_bits(combine(y, weights, place), (y[place[:, 0]].float() * weights).bfloat16())


def test_neighbours_that_are_not_numbers_stay_out():
    y, weights, place = inputs(9, 2, 20, torch.float32)
    clean = combine(y, weights, place)
    y[place[4]] = torch.nan
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert_same_bits(combine(y, weights, place)[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_dispatches_and_has_its_gradients(dtype):
    y, weights, place = inputs(7, 3, 10, dtype)
    y.requires_grad_(), weights.requires_grad_()
    cotangent = torch.randn(7, 10).to(dtype)
    with triton_on_cpu():
        ours = torch.autograd.grad(entry.combine(y, weights, place), (y, weights), cotangent)
    wide = y.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    expected = torch.autograd.grad((wide[0][place] * wide[1][..., None]).sum(1), wide, cotangent.double())
    assert ours[0].dtype is dtype and ours[1].dtype is torch.float32
    assert_near(ours[0], expected[0], 1e-6 + EPSILON[dtype] * expected[0].abs())
    assert_near(ours[1], expected[1], 1e-5)


def test_nothing_and_what_is_not_supported():
    ids = torch.zeros(2, 2, dtype=torch.int64)
    assert combine(torch.empty(0, 8), torch.empty(0, 2), ids[:0]).shape == (0, 8)
    with pytest.raises(ValueError, match=r"combine: \[5, 8\] float32.*supported: y \[T \* K, N\]"):
        combine(torch.randn(5, 8), torch.randn(2, 2), ids)
    with pytest.raises(ValueError, match="weights float32"):
        combine(torch.randn(4, 8).bfloat16(), torch.randn(2, 2).bfloat16(), ids)
    with pytest.raises(ValueError, match="contiguous"):
        combine(torch.randn(8, 4).t(), torch.randn(2, 2), ids)


def test_shapes_are_known_without_running():
    torch.library.opcheck(op.combine, inputs(5, 2, 8, torch.float32), test_utils=("test_schema", "test_faketensor"))
