"""The parity chain through the real engine and the real trainer, with the Triton kernels: a toy of two layers, tens of tokens.

    python -m pytest tests/kernels/interpreted/test_chain.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import DTYPES
from torch.distributed.device_mesh import DeviceMesh

from kernels.dispatch import triton_on_cpu
from miles_core import pack
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf, parallel
from miles_core.model.attend import PackedAttend
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.optim import Optimizer
from miles_core.parity import Gate
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes
from miles_core.schema import Batch, Trajectory

DENSE = ModelConfig(
    family="qwen3", vocab_size=45, hidden_size=40, intermediate_size=56, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=1e4, max_position=256, tie_embeddings=True, qk_norm=True,
)  # fmt: skip
MIXTURE = replace(DENSE, family="qwen3_moe", moe=MoEConfig(num_experts=5, top_k=2, expert_size=24, layers=(0, 1)))
CONFIGS = pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])


def toy(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    model = hf.build(config, dtype=dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if "norm" in name else p.copy_(torch.randn(p.shape) * 0.2)
    return model


def routed(batch: Batch, model: Transformer) -> TrainRoutes:
    """What the gate looks at; the live router decides."""
    return TrainRoutes(batch, model.config.moe, replay=False, passes=1, balance=BalanceParams())


def sampled(model: Transformer, lengths: tuple[int, ...] = (3, 9), store: RouteStore | None = None, **changes: int) -> list[Trajectory]:
    """Two answers to each prompt. Their routes go to the store."""
    rng = np.random.default_rng(0)
    sizes = {"num_pages": 12, "max_batch_tokens": 64, "max_sequences": 4, **changes}
    engine = Engine(model, None, seed=1, **sizes, routing_replay="off" if store is None else "on")
    ways = [SamplingParams(1.0, 1.0, 0, 5, ()), SamplingParams(0.7, 0.9, 20, 4, ())]
    prompts = [rng.integers(0, 45, length).astype(np.int32) for length in lengths]
    requests = [Request(g, sample, prompt, ways[g % 2]) for g, prompt in enumerate(prompts) for sample in range(2)]
    completions = engine.generate(requests)
    for completion in completions if store is not None else ():
        store.keep(completion.trajectory, completion.routes)
    return [completion.trajectory for completion in completions]


@CONFIGS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trainer_and_sampler_agree_to_the_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    """A mixture's routes are recorded and replayed, and are those of the live router."""
    model, gate, store = toy(config, dtype), Gate("strict", "recompute", synchronous=True), RouteStore(0, None)
    with triton_on_cpu():
        trajectories = sampled(model, (3, 62), store if config.moe else None)  # the answers to the second cross a page
        (batch,) = pack.pack(trajectories, 400)
        batch = Fetch(trajectories if config.moe else [], store, None, config.moe, torch.device("cpu"), 1.0).attach(batch)
        attend = PackedAttend(batch.cu_seqlens_S1, config.head_dim**-0.5)
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        route = TrainRoutes(batch, config.moe, replay=True, passes=1, balance=BalanceParams())
        logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
        seen = gate.watch(logp_M, batch, 0, route)
        logp_M.mean().backward()
    assert gate.rerouted is None and len(route.differs_LT) == route.num_layers
    assert seen["train/logp_diff_tokens"].value() == 18 and seen["train/logp_diff_max"].value() == 0.0
    assert gate.difference is None
    assert all(p.grad.dtype is dtype and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@CONFIGS
def test_company_chunks_and_preemption_change_no_bit(config: ModelConfig) -> None:
    model = toy(config, torch.bfloat16)
    with triton_on_cpu():
        expected = sampled(model, (3, 62))
        for changes in ({"max_sequences": 1, "max_batch_tokens": 23}, {"num_pages": 3})[: 1 if config.moe else 2]:  # seconds a token
            for a, b in zip(sampled(model, (3, 62), **changes), expected, strict=True):
                assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logp_roll, b.logp_roll), (changes, a.group, a.sample)


@CONFIGS
def test_gradients_are_those_of_the_cpu_kernels(config: ModelConfig) -> None:
    """In float32, to rounding: the backward passes are the same torch code (but for the experts'), fed by other forwards."""
    grads = []
    model = toy(config, torch.float32)
    trajectories = sampled(model)
    (batch,) = pack.pack(trajectories, 400)
    sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)

    def backward() -> None:
        attend = PackedAttend(batch.cu_seqlens_S1, config.head_dim**-0.5)
        logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling)
        logp_M.mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()

    backward()
    with triton_on_cpu():
        backward()
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_bfloat16_over_float32_masters() -> None:
    """What a run on GPUs does: FSDP2 gathers masters rounded to bfloat16, the sampler gets those bits, the optimizer moves the masters."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer, sampler = toy(MIXTURE, torch.float32), hf.build(MIXTURE, dtype=torch.bfloat16)
    parallel.shard(trainer, DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("fsdp",)), torch.bfloat16)
    optimizer = Optimizer(
        trainer, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0, schedule="constant", warmup_steps=0, total_steps=9
    )
    weights = dict(sampler.named_parameters())
    gate = Gate("strict", "recompute", synchronous=True)
    for version in range(2):
        with torch.no_grad():
            for name, tensor in parallel.full_tensors(trainer):
                assert tensor.dtype is torch.bfloat16
                weights[name].copy_(tensor)
        with triton_on_cpu():
            (batch,) = pack.pack(sampled(sampler), 400)
            parallel.expect_backward(trainer, last=True)
            attend = PackedAttend(batch.cu_seqlens_S1, MIXTURE.head_dim**-0.5)
            sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
            logp_M, _ = trainer(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling)
            assert gate.watch(logp_M, batch, 0, routed(batch, trainer))["train/logp_diff_max"].value() == 0.0
            logp_M.mean().backward()
        assert optimizer.step(version) > 0
        for name, master in parallel.full_tensors(trainer, master=True):
            assert master.dtype is torch.float32 and not torch.equal(master.bfloat16(), weights[name]), name
