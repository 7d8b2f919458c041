"""Experts dealt over ranks change nothing: log-probs are the bits of one rank, gradients and steps agree with it, checkpoints fit all.

    python -m pytest tests/dist/test_expert_parallel.py

Legend: T tokens, M sampled tokens, L MoE layers, K slots, E experts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from miles_core import pack
from miles_core.checkpoint import Checkpointer, Tensors, latest, load_optimizer
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.parallel import expect_backward, full_tensors, shard
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.optim import Optimizer
from miles_core.routing import BalanceParams, TrainRoutes, load
from miles_core.schema import Batch, Trajectory
from miles_core.topology import Layout, Topology
from train import score

BASE = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position": 256, "tie_embeddings": False,
}  # fmt: skip
GLM = MoEConfig(
    8, 3, 12, (1, 2), scoring="sigmoid", scale=1.7, num_groups=4, top_groups=2, correction_bias=True, shared_size=16,
)  # fmt: skip
CONFIGS = {
    "qwen3-moe": ModelConfig(family="qwen3_moe", num_layers=2, qk_norm=True, moe=MoEConfig(8, 3, 12, (0, 1)), **BASE),
    "glm4-moe": ModelConfig(family="glm4_moe", num_layers=3, rotary_dim=4, moe=GLM, **BASE),
}
CASES = {  # sequences of a step, and the experts that every token is sent to
    "as the routers say": (11, None),
    "all to the last rank": (11, (7, 5, 6)),  # with two ranks; with four, to the last two of them: the others send all away and get none
    "empty ranks": (1, None),
}
MODES = {"zero-2": (False, False), "zero-3": (True, False), "zero-2, recomputed": (False, True)}  # reshard, checkpoint activations
KEYS = [key for key in product(CONFIGS, CASES, MODES) if key[1] == "as the routers say" or key[2] != "zero-2, recomputed"]
WORLDS = [(2, 2), (4, 2), (4, 4)]  # ranks, ranks that share the experts of a layer
MAX_TOKENS = 40


def make_model(name: str) -> Transformer:
    generator, model = torch.Generator().manual_seed(0), hf.build(CONFIGS[name])
    with torch.no_grad():
        for weight_name, p in named_weights(model):
            p.normal_(float("norm" in weight_name), 0.1 if p.ndim == 1 else 0.3, generator=generator)
    return model


def make_step(num_sequences: int) -> list[Trajectory]:
    random, step = np.random.default_rng(num_sequences), []
    for sample in range(num_sequences):
        prompt, answer = int(random.integers(2, 6)), int(random.integers(4, 22))
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]
        step.append(
            Trajectory(
                group=1,
                sample=sample,
                tokens=random.integers(0, 61, prompt + answer).astype(np.int32),
                loss_mask=mask,
                logp_roll=np.zeros(prompt + answer, np.float32),
                version=np.array([[0, answer]], np.int32),
                turns=np.array([prompt, answer], np.int32),
                finish=0,
                advantage=float(random.normal()),
            )  # fmt: skip
        )
    return step


def with_routes(batch: Batch, moe: MoEConfig, ids: tuple[int, ...] | None) -> Batch:
    """The batch as if every token had been sent to these experts; as it is with None, or for a dummy."""
    if ids is None or int(batch.ids_S3[0, 0]) < 0:
        return batch
    rows_TLK = torch.tensor(ids, dtype=torch.uint8).expand(batch.num_tokens, len(moe.layers), moe.top_k).contiguous()
    return replace(batch, routes_TLK=rows_TLK, routed_T=torch.ones(batch.num_tokens, dtype=torch.bool))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.redistribute(placements=[Replicate(), Shard(0)]) if tensor.device_mesh.ndim == 2 else tensor
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def train(model: Transformer, shares: list[list[Trajectory]], rank: int, ids: tuple[int, ...] | None) -> dict:
    """Two optimizer steps on this rank's share, as train.py takes them, with router losses. Log-probs and loads are those of the first."""
    optimizer = Optimizer(
        model, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.05, schedule="constant", warmup_steps=0, total_steps=2
    )
    counts = pack.Counts(*np.sum([pack.count(share) for share in shares], 0).tolist())
    balance = BalanceParams(0.1, 0.01, counts.sequences, counts.tokens)
    most = max(len(pack.pack(share, MAX_TOKENS)) for share in shares)
    batches = pack.pad(pack.pack(shares[rank], MAX_TOKENS), most)
    start = {name: tensor.clone() for name, tensor in full_tensors(model)}
    seen: dict = {"start": start, "logp": {}, "norms": [], "gradients": [], "num_real": sum(int(b.ids_S3[0, 0]) >= 0 for b in batches)}
    for version in range(2):
        routes = []
        for number, batch in enumerate(batches, 1):
            expect_backward(model, last=number == len(batches))
            batch = with_routes(batch, model.config.moe, ids)
            route = TrainRoutes(batch, model.config.moe, replay=True, passes=1 + model.activation_checkpointing, balance=balance)
            logp_M = score(model, batch, route)[0]
            ((logp_M * batch.advantage_M * batch.keep_M).sum() / counts.loss_tokens + route.loss).backward()
            route.check()
            routes.append(route)
            for sequence, (group, sample, _) in enumerate(batch.ids_S3.tolist()):
                if group >= 0 and version == 0:
                    seen["logp"][sample] = logp_M.detach()[batch.sequence_M == sequence]
        seen.setdefault("load", load(routes))
        seen["gradients"].append({name: whole(p.grad) for name, p in optimizer.parameters.items()})
        seen["norms"].append(optimizer.step(version))
        seen["weights"] = {name: tensor.clone() for name, tensor in full_tensors(model, master=version == 0)}
    return seen


def topology(size: int) -> Topology:
    num_ranks = int(os.environ["WORLD_SIZE"])
    return Topology(Layout(num_ranks, num_ranks, 0), torch.device("cpu"), torch.float32, 60.0, size)


def all_cases(size: int) -> dict[tuple[str, str, str], dict]:
    """Every model, case and mode on the ranks of the world, with the experts of a layer dealt to `size` of them."""
    topo, found = topology(size), {}
    for name, case, mode in KEYS:
        reshard, checkpointing = MODES[mode]
        model = make_model(name)
        model.activation_checkpointing = checkpointing
        shard(model, topo.train_mesh, torch.float32, topo.expert_mesh, reshard_after_forward=reshard)
        held = sum(p.to_local().numel() for p in model.layers[-1].mlp.experts.parameters())
        assert held == 3 * 8 * 12 * 24 // topo.layout.world_size, "each rank holds its part of each expert tensor, once"
        num_sequences, ids = CASES[case]
        found[name, case, mode] = train(model, pack.balance(make_step(num_sequences), topo.layout.world_size), topo.rank, ids)
    return found


@cache
def ranks_of(num_ranks: int, size: int) -> list[dict[tuple[str, str, str], dict]]:
    return run_ranks(num_ranks, all_cases, size, timeout=120.0)


@pytest.mark.parametrize(("num_ranks", "size"), WORLDS)
def test_log_probs_are_the_bits_of_one_rank(num_ranks: int, size: int) -> None:
    (alone,), ranks = ranks_of(1, 1), ranks_of(num_ranks, size)
    for key in KEYS:
        found = [rank[key]["logp"] for rank in ranks]
        merged = {sample: logp_M for logps in found for sample, logp_M in logps.items()}
        assert sum(map(len, found)) == len(merged) == CASES[key[1]][0], "every sequence went through one rank"
        for sample, logp_M in alone[key]["logp"].items():
            assert torch.equal(merged[sample], logp_M), (key, sample)


def test_the_cases_are_what_they_say() -> None:
    """Otherwise the comparisons would compare less than they claim."""
    num_real = {key: [rank[key]["num_real"] for rank in ranks_of(4, 4)] for key in KEYS}
    for name, case, mode in KEYS:
        numbers = num_real[name, case, mode]
        assert (min(numbers) == 0) == (case == "empty ranks")
        assert case == "empty ranks" or len(set(numbers)) > 1, "some rank has a dummy where another has a batch"
        load_LE = ranks_of(1, 1)[0][name, case, mode]["load"]
        assert (load_LE[:, :5].sum() == 0) == (case == "all to the last rank") and load_LE.sum() > 0


@pytest.mark.parametrize(("num_ranks", "size"), WORLDS)
def test_gradients_and_loads_add_up_to_those_of_one_rank(num_ranks: int, size: int) -> None:
    (alone,), ranks = ranks_of(1, 1), ranks_of(num_ranks, size)
    for key in KEYS:
        assert torch.equal(sum(rank[key]["load"] for rank in ranks), alone[key]["load"])
        for rank in ranks:
            for version, tolerance in ((0, 2e-6), (1, 1e-5)):  # weights have drifted by rounding before the second step
                gradients, wanted = rank[key]["gradients"][version], alone[key]["gradients"][version]
                assert gradients.keys() == wanted.keys()
                for name, gradient in wanted.items():
                    assert (gradients[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), (key, version, name)


@pytest.mark.parametrize(("num_ranks", "size"), WORLDS)
def test_full_tensors_and_steps_are_those_of_one_rank(num_ranks: int, size: int) -> None:
    (alone,), ranks = ranks_of(1, 1), ranks_of(num_ranks, size)
    for key in KEYS:
        wanted = dict(named_weights(make_model(key[0])))
        for rank in ranks:
            found = rank[key]
            assert list(found["start"]) == list(wanted) and all(torch.equal(found["start"][name], wanted[name]) for name in wanted)
            assert found["norms"] == ranks[0][key]["norms"], "ranks agree to the bit"
            assert found["norms"] == pytest.approx(alone[key]["norms"], rel=1e-6) and min(found["norms"]) > 0.05, "clipping is active"
            for name, weight in alone[key]["weights"].items():
                assert torch.equal(found["weights"][name], ranks[0][key]["weights"][name])
                assert (found["weights"][name] - weight).abs().max() <= 5e-6, (key, name)


# ---- checkpoints


def write_model(path: Path, tensors: Tensors) -> None:
    path.mkdir()
    torch.save(dict(tensors), path / "weights.pt")


class Run:
    """The model on all ranks of the world, with gradients that are a function of the weights alone, element by element."""

    def __init__(self, directory: Path, size: int, resume: Path | None = None):
        topo, self.model = topology(size), make_model("glm4-moe")
        if resume is not None:
            saved = torch.load(resume / "weights.pt")
            with torch.no_grad():
                for name, weight in named_weights(self.model):
                    weight.copy_(saved[name])
        shard(self.model, topo.train_mesh, torch.float32, topo.expert_mesh)
        self.parameters = dict(self.model.named_parameters())
        experts = [p for p in self.parameters.values() if p.ndim == 3]
        others = [p for p in self.parameters.values() if p.ndim != 3]
        self.adamw = torch.optim.AdamW([{"params": others}, {"params": experts}], lr=1e-2, fused=True)
        self.checkpoints = Checkpointer(directory, 2, topo.checkpoint_group)
        if resume is not None:
            load_optimizer(resume, self.parameters, self.adamw, topo.control_group)

    def step(self, number: int) -> None:
        for p in self.parameters.values():
            p.grad = p.detach() * 0.5 + 0.25 * (number + 1)
        self.adamw.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state, whole."""
        found = {name: tensor.clone() for name, tensor in full_tensors(self.model, master=True)}
        fields = ("exp_avg", "exp_avg_sq")
        return found | {f"{field}/{name}": whole(self.adamw.state[p][field]) for name, p in self.parameters.items() for field in fields}


States = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def first_run(directory: Path, size: int) -> States:
    """Two steps, save, then two more while the checkpoint is being written. Returns the state after two steps and after four."""
    run = Run(directory, size)
    run.step(0)
    run.step(1)
    run.checkpoints.save(2, run.parameters, run.adamw, full_tensors(run.model, master=True), {"version": 2}, (), write_model)
    saved = run.state()
    run.step(2)
    run.step(3)
    run.checkpoints.finish()
    return saved, run.state()


def resumed_run(directory: Path, size: int) -> States:
    run = Run(directory, size, latest(directory))
    assert {float(state["step"]) for state in run.adamw.state.values()} == {2.0}
    loaded = run.state()
    run.step(2)
    run.step(3)
    return loaded, run.state()


@pytest.mark.parametrize(("before", "after"), [((2, 2), [(1, 1), (2, 1), (4, 4)]), ((4, 2), [(1, 1), (2, 2), (4, 2)]), ((1, 1), [(4, 2)])])
def test_a_checkpoint_resumes_with_the_experts_dealt_otherwise(
    before: tuple[int, int], after: list[tuple[int, int]], tmp_path: Path
) -> None:  # fmt: skip
    """The state comes back to the bit. Later steps round by the shards: AdamW computes the last few elements of each another way."""
    saved, uninterrupted = run_ranks(before[0], first_run, tmp_path, before[1])[0]
    assert len([name for name in saved if "experts" in name and not name.endswith("_proj.weight")]) == 3 * 3 * 2
    assert len({float(tensor.abs().sum()) for name, tensor in saved.items() if "/" in name}) > 20, "states can be told apart"
    for num_ranks, size in after:
        for loaded, found in run_ranks(num_ranks, resumed_run, tmp_path, size):
            assert loaded.keys() == saved.keys()
            assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []
            for name, tensor in uninterrupted.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
