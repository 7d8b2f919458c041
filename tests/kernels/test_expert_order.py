"""kernels.expert_order: the same integers as a stable sort. Run: pytest tests/kernels/test_expert_order.py"""

import pytest
import torch

from kernels.expert_order import expert_order


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (0, 2, 5), (7, 2, 8), (100, 3, 2), (50, 8, 300), (1000, 4, 17)])
def test_is_a_stable_sort(impl, tokens, slots, experts):
    ids = torch.randint(experts, (tokens, slots))
    order, place, offsets = expert_order(ids, experts)
    sorted_ids, expected = torch.sort(ids.flatten(), stable=True)
    assert (order.dtype, place.dtype, offsets.dtype) == (torch.int64, torch.int64, torch.int32)
    assert torch.equal(order, expected)
    assert place.shape == ids.shape and torch.equal(order[place.flatten()], torch.arange(tokens * slots))
    assert offsets.tolist() == torch.searchsorted(sorted_ids, torch.arange(experts + 1)).tolist()


def test_one_expert_takes_all_and_the_others_none(impl):
    order, place, offsets = expert_order(torch.full((5, 2), 3), 6)
    assert order.tolist() == list(range(10)) == place.flatten().tolist()
    assert offsets.tolist() == [0, 0, 0, 0, 10, 10, 10]


def test_strides(impl):
    ids = torch.randint(5, (3, 20)).t()
    for ours, expected in zip(expert_order(ids, 5), expert_order(ids.contiguous(), 5), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_id_outside_is_an_error(impl, bad):
    with pytest.raises(AssertionError):
        expert_order(torch.tensor([[0, 1], [bad, 2]]), 4)
