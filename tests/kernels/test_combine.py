"""kernels.combine: one chain of fused multiply-adds over the slots, float64 reference. Run: pytest tests/kernels/test_combine.py"""

import numpy as np
import pytest
import torch
from conftest import assert_row_invariant, doubles, gradients

from kernels.combine import combine


@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 1), (3, 2, 7), (20, 4, 33), (70, 8, 96)])
def test_forward_and_gradients_match_float64(impl, tokens, slots, width):
    y, weights = torch.randn(tokens * slots, width, requires_grad=True), torch.randn(tokens, slots, requires_grad=True)
    place = torch.randperm(tokens * slots).view(tokens, slots)
    wide = doubles(y, weights)
    reference = (wide[0][place] * wide[1][..., None]).sum(1)
    out = combine(y, weights, place)
    torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(tokens, width)
    for grad, expected in zip(gradients(out, [y, weights], cotangent), gradients(reference, wide, cotangent), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_sum_is_one_chain_in_slot_order():
    """The C++ rule, spelled out: a product, then fma, rounded to float32 each time."""
    y, weights, place = torch.randn(15, 20), torch.randn(5, 3), torch.randperm(15).view(5, 3)
    out = combine(y, weights, place).numpy()
    for t in range(5):
        for n in range(20):
            total = np.float32(0)
            for k in range(3):
                total = np.float32(np.longdouble(y[place[t, k], n].item()) * np.longdouble(weights[t, k].item()) + np.longdouble(total))
            assert out[t, n] == total, (t, n)


@pytest.mark.parametrize("width", [1, 15, 16, 40])
def test_rows_do_not_depend_on_the_batch(impl, width):
    """A token brings its own rows: wherever they stand, the same bits."""

    def op(rows_TKN: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        place = torch.randperm(weights.numel())
        y = torch.empty(weights.numel(), width)
        y[place] = rows_TKN.reshape(-1, width)
        return combine(y, weights, place.view_as(weights))

    assert_row_invariant(op, torch.randn(70, 3, width), torch.randn(70, 3))


def test_nothing_and_what_does_not_fit(impl):
    assert combine(torch.empty(0, 5), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 5)
    with pytest.raises(AssertionError):
        combine(torch.randn(5, 3), torch.randn(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises((AssertionError, IndexError)):
        combine(torch.randn(4, 3), torch.randn(2, 2), torch.tensor([[0, 1], [2, 4]]))
