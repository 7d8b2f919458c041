"""kernels/expert_order/triton.py in the interpreter. Run: pytest tests/kernels/interpreted/test_expert_order.py"""

import pytest
import torch

from kernels.expert_order import ref
from kernels.expert_order import triton as op
from kernels.expert_order.triton import expert_order

SIZES = [(1, 1, 1), (0, 2, 5), (7, 2, 8), (100, 3, 2), (300, 8, 5)]  # the last has more slots than a block


@pytest.mark.parametrize(("tokens", "slots", "experts"), SIZES)
def test_is_a_stable_sort(tokens, slots, experts):
    ids = torch.randint(experts, (tokens, slots))
    ours, expected = expert_order(ids, experts), ref.expert_order(ids, experts)
    assert torch.equal(ours[0], torch.sort(ids.flatten(), stable=True).indices)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


def test_one_expert_takes_all_and_the_others_none():
    order, place, offsets = expert_order(torch.full((5, 2), 3), 6)
    assert order.tolist() == list(range(10)) == place.flatten().tolist()
    assert offsets.tolist() == [0, 0, 0, 0, 10, 10, 10]


def test_what_is_no_experts_id_comes_last():
    """Nobody looks at ids on a GPU: order and place are permutations all the same, so that nothing reads outside of its memory."""
    order, place, offsets = expert_order(torch.tensor([[2, -1], [0, 3], [2**40, 1]]), 3)
    assert order.tolist() == [2, 5, 0, 1, 3, 4] and offsets.tolist() == [0, 1, 2, 3]
    assert place.tolist() == [[2, 3], [0, 4], [5, 1]]


def test_what_is_not_supported_is_named():
    with pytest.raises(ValueError, match=r"expert_order: \[2, 2\] int32.*supported: ids int64 \[T, K\]"):
        expert_order(torch.zeros(2, 2, dtype=torch.int32), 3)
    with pytest.raises(ValueError, match="at least 1 expert"):
        expert_order(torch.zeros(2, 2, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="contiguous"):
        expert_order(torch.zeros(2, 3, dtype=torch.int64).t(), 3)


def test_shapes_are_known_without_running():
    torch.library.opcheck(op.expert_order, (torch.tensor([[0, 2], [1, 1]]), 3), test_utils=("test_schema", "test_faketensor"))
