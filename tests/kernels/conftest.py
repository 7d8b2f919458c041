"""What every kernel test shares: both implementations, uninitialised memory full of NaN, and the ways to cut a batch."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.cpu import implementation, select
from kernels.invariance import self_test

collect_ignore = ["interpreted"]  # in processes of their own: test_interpreted.py

CHUNKS = (1, 3, 7, 16, 20)


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """torch.empty and its kin return NaN, so that an output nobody wrote cannot pass for a result."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpp", "torch"])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with the C++ library and with the torch path."""
    before = implementation()
    select(request.param)
    self_test([(24, 8)], head_dim=8, num_heads=2, num_kv_heads=1, vocab=16)  # opens the torch path
    yield request.param
    select(before)


@pytest.fixture
def two_threads() -> Iterator[Callable[[], None]]:
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(2)
    torch.set_num_threads(before)


def assert_row_invariant(op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """op gives every row the same bits in the whole batch, in chunks of any size, and at another place of the batch."""
    together = op(*inputs)
    for size in CHUNKS:
        apart = torch.cat([op(*rows) for rows in zip(*(x.split(size) for x in inputs), strict=True)])
        assert torch.equal(together, apart), f"chunks of {size}"
    rolled = op(*(x.roll(5, 0) for x in inputs)).roll(-5, 0)
    assert torch.equal(together, rolled), "rolled by 5 rows"


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs)


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """float64 copies with a gradient: the inputs of the reference."""
    return [x.detach().double().requires_grad_() for x in tensors]
