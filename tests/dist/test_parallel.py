"""Sharding changes nothing: gradients are the sum over ranks, to the bit; full tensors are what went in, on every rank, at any time.

python -m pytest tests/dist/test_parallel.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from miles_core.model.parallel import expect_backward, full_tensors, shard

WIDTH = 7  # divides by no number of ranks used here: shards are uneven, and with 3 values one is empty on 4 ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + torch.tanh(self.linear(x_TD)) * self.gain.mean()


class Model(nn.Module):
    """Tied like the real ones: the embedding is the head too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.layers = nn.Embedding(11, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        x_TD = self.embed_tokens(ids_T)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return (x_TD @ self.embed_tokens.weight.T).log_softmax(-1)[:, 0].sum()


def ids(rank: int) -> torch.Tensor:
    return torch.randint(11, (5,), generator=torch.Generator().manual_seed(rank))


def sharded(reshard_after_forward: bool = False) -> Model:
    model = Model()
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=reshard_after_forward)
    return model


def plain_parameters(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def gradients(reshard_after_forward: bool) -> tuple[dict, list[str]]:
    """Of a step as train.py takes it: the weights have just been published. Also what is not sharded afterwards."""
    dist.init_process_group("gloo")
    model = sharded(reshard_after_forward)
    for _ in full_tensors(model):
        pass
    assert bool(plain_parameters(model)) != reshard_after_forward, "gathered weights stay for the forward, unless told otherwise"
    for micro_batch in range(2):
        expect_backward(model, last=micro_batch == 1)
        model(ids(dist.get_rank() + 4 * micro_batch)).backward()
    plain = plain_parameters(model)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, plain


@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_are_the_sum_over_ranks_and_micro_batches(num_ranks: int, reshard_after_forward: bool) -> None:
    parts = []
    for micro_batch in range(2):
        for rank in range(num_ranks):
            model = Model()
            model(ids(rank + 4 * micro_batch)).backward()
            parts.append({name: p.grad.double() for name, p in model.named_parameters()})
    for found, plain in run_ranks(num_ranks, gradients, reshard_after_forward):
        assert not plain, "every parameter is sharded, on one rank too"
        assert list(found) == list(parts[0])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.double(), sum(part[name] for part in parts), rtol=1e-5, atol=1e-6)


def whole(reshard_after_forward: bool) -> bool:
    """Full tensors before anything, after a forward alone (the root keeps gathered copies then), and after a step that followed it."""
    dist.init_process_group("gloo")
    model, want = sharded(reshard_after_forward), dict(Model().named_parameters())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    equal = []

    def compare() -> None:
        found = dict(full_tensors(model))
        equal.extend([list(found) == list(want)] + [torch.equal(found[name], want[name]) for name in want])
        equal.extend(not t.requires_grad and t.dtype == torch.float32 for t in found.values())

    compare()
    with torch.no_grad():
        model(ids(0))
    compare()
    with torch.no_grad():
        model(ids(0))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    want = {name: p.detach() - 1.0 for name, p in want.items()}
    compare()
    return all(equal)


@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_full_tensors_are_the_weights_at_any_time(num_ranks: int, reshard_after_forward: bool) -> None:
    assert run_ranks(num_ranks, whole, reshard_after_forward) == [True] * num_ranks


def test_one_rank_computes_the_same_bits_as_no_sharding() -> None:
    model = Model()
    for micro_batch in range(2):
        model(ids(4 * micro_batch)).backward()
    ((found, _),) = run_ranks(1, gradients, False)
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())
