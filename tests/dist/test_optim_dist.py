"""One optimizer step is the same on 1, 2, 3 and 4 training ranks, however its sequences were cut, with empty ranks too.

The whole training path runs: balance -> pack -> pad -> policy_loss -> FSDP2 backward -> Optimizer, against one process without
FSDP and one micro-batch a step. Stated, for three steps of lr 1e-3: losses within 1e-6; gradient norms within 1e-6 relative, and
the same bits on every rank; gradients of the first step within 1e-6 of the largest of their tensor, of later steps (the weights
have then drifted by rounding) within 5e-6; weights at the end within 1e-6 absolute.

    python -m pytest tests/dist/test_optim_dist.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from miles_core import pack
from miles_core.loss import LossParams, denominator, policy_loss
from miles_core.metrics import merge, reduce
from miles_core.model.parallel import shard
from miles_core.optim import Optimizer, grad_norm
from miles_core.schema import Trajectory

VOCABULARY, WIDTH = 23, 13  # neither divides by 2 or 4: shards are uneven
PARAMS = LossParams(
    loss="ppo_clip", anchor="sampler", aggregation="token_mean", clip_low=0.2, clip_high=0.2, dual_clip=0.0, importance_cap=2.0,
    icepop_low=0.0, icepop_high=0.0, kl_coef=0.0, kl_kind="k3", max_new_tokens=8,
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(3))  # three values: on four ranks one shard is empty

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + torch.tanh(self.linear(x_TD)) * self.gain.mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, batch: pack.Batch) -> torch.Tensor:
        x_TD = self.embed_tokens(batch.tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD)
        logp_MV = self.head(x_TD[batch.rows_M]).log_softmax(-1)
        return logp_MV.gather(1, batch.targets_M[:, None]).sum(1)


def make_step(version: int, num_sequences: int) -> list[Trajectory]:
    """Sequences of 5 to 27 tokens near the uniform policy; one in five is masked out."""
    random = np.random.default_rng([version, num_sequences])
    step = []
    for sample in range(num_sequences):
        prompt, answer = int(random.integers(2, 8)), int(random.integers(3, 20))
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]
        tokens = random.integers(0, VOCABULARY, prompt + answer).astype(np.int32)
        logp_roll = np.where(mask, random.normal(-math.log(VOCABULARY), 0.3, prompt + answer), 0).astype(np.float32)
        verdict = int(sample % 5 == 4)
        step.append(
            Trajectory(
                group=version, sample=sample, tokens=tokens, loss_mask=mask, logp_roll=logp_roll, finish=0, verdict=verdict,
                version=np.array([[version, answer]], np.int32), turns=np.array([prompt, answer], np.int32),
                advantage=0.0 if verdict else float(random.normal()),
            )  # fmt: skip
        )
    return step


def train(sizes: list[int], max_tokens: int, aggregation: str, model: nn.Module, rank: int, num_ranks: int) -> dict:
    """Three optimizer steps on this rank's share. `sizes` are the sequences of each step."""
    params = LossParams(**{**vars(PARAMS), "aggregation": aggregation})
    optimizer = Optimizer(
        model, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.05, schedule="linear", warmup_steps=2, total_steps=5
    )
    seen: dict = {"norms": [], "losses": [], "gradients": [], "empty": []}
    for version, size in enumerate(sizes):
        mine = pack.balance(make_step(version, size), num_ranks)[rank]
        batches = pack.pack(mine, max_tokens)
        counts = torch.tensor(pack.count(mine), dtype=torch.float64)
        most = torch.tensor(len(batches))
        if num_ranks > 1:
            dist.all_reduce(counts)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        total = denominator(params, counts[0].item(), counts[1].item())
        metrics = []
        for batch in pack.pad(batches, int(most)):
            logp_M = model(batch)
            loss, found = policy_loss(logp_M, torch.zeros_like(logp_M), batch, params, total)
            loss.backward()
            metrics.append(found)
        gradients = {name: full(p.grad) for name, p in model.named_parameters()}
        seen["gradients"].append(gradients)
        seen["empty"].append(not mine)
        seen["norms"].append(optimizer.step(version))
        merged = merge(metrics)
        seen["losses"].append(reduce(merged, dist.group.WORLD)["train/loss"] if dist.is_initialized() else merged["train/loss"].value())
    seen["weights"] = {name: full(p) for name, p in model.named_parameters()}
    return seen


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sharded_model() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    shard(model, mesh)
    return model


def sharded_runs(sizes: list[int], budgets: list[int], aggregation: str) -> list[dict]:
    """One run from the same start for each micro-batch budget."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return [train(sizes, max_tokens, aggregation, sharded_model(), rank, num_ranks) for max_tokens in budgets]


def assert_equal_runs(found: dict, expected: dict) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for step, (gradients, wanted) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max() <= (5e-6 if step else 1e-6) * gradient.abs().max(), (step, name)
    for name, weight in expected["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= 1e-6, name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_same_as_one_process(num_ranks: int, aggregation: str) -> None:
    sizes = [13, 9, 13]
    expected = train(sizes, 10_000, aggregation, Model(), rank=0, num_ranks=1)
    assert min(expected["norms"]) > 0.05, "clipping must be active for the comparison to mean something"
    ranks = run_ranks(num_ranks, sharded_runs, sizes, [10_000, 40], aggregation)
    for runs in ranks:
        for found, of_rank_0 in zip(runs, ranks[0], strict=True):
            assert_equal_runs(found, expected)
            assert found["norms"] == of_rank_0["norms"] and found["losses"] == of_rank_0["losses"], "ranks must agree to the bit"


def test_ranks_without_a_sequence_still_take_part() -> None:
    """Two sequences for four ranks, then plenty again: nobody hangs and the result is that of one process."""
    sizes = [13, 2, 13]
    ranks = [found for (found,) in run_ranks(4, sharded_runs, sizes, [40], "token_mean")]
    assert [found["empty"][1] for found in ranks] == [False, False, True, True]
    expected = train(sizes, 10_000, "token_mean", Model(), rank=0, num_ranks=1)
    for found in ranks:
        assert_equal_runs(found, expected)


def test_a_step_whose_every_sample_is_masked_has_zero_gradient() -> None:
    ((found,),) = run_ranks(1, sharded_runs, [0, 0], [40], "token_mean")
    assert found["norms"] == [0.0, 0.0]


def test_the_same_run_twice_gives_the_same_bits() -> None:
    first, second = run_ranks(2, sharded_runs, [13, 9], [40, 40], "token_mean")[0]
    assert first["norms"] == second["norms"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def broken_run() -> tuple[str, bool]:
    dist.init_process_group("gloo")
    model = sharded_model()
    optimizer = Optimizer(
        model, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0, schedule="constant", warmup_steps=0, total_steps=5
    )
    before = [full(p) for p in model.parameters()]
    model(pack.dummy()).sum().backward()
    gradient = model.head.weight.grad.to_local()
    if dist.get_rank() == 1:
        gradient[0, 0] = math.nan
    with pytest.raises(RuntimeError) as error:
        optimizer.step(4)
    return str(error.value), all(torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_nan_on_one_rank_stops_all_of_them_before_any_weight_changes() -> None:
    here, there = "head.weight", "nothing (see the other ranks)"
    messages = run_ranks(3, broken_run)
    assert messages == [(f"step 5: the gradient norm is nan; not finite on this rank: {where}", True) for where in (there, here, there)]


def norm_run() -> tuple[float, float]:
    dist.init_process_group("gloo")
    model = sharded_model()
    model(pack.dummy()).sum().backward()
    parameters = dict(model.named_parameters())
    return grad_norm(parameters), torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]).full_tensor().item()


def test_norm_agrees_with_torch_and_between_worlds() -> None:
    """Every rank adds the same gradient, so the norm of their sum grows with the number of ranks."""
    one, _ = run_ranks(1, norm_run)[0]
    for num_ranks in (1, 2, 4):
        for ours, torchs in run_ranks(num_ranks, norm_run):
            assert ours == pytest.approx(torchs, rel=1e-5)
            assert ours == pytest.approx(num_ranks * one, rel=1e-12)
