"""What needs a GPU: the compiled kernels do not depend on the batch, and sampler and trainer agree to the bit through a whole run.

    launch/test.sh -m gpu          (or pytest tests/kernels/test_gpu.py -m gpu)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.invariance import self_test
from kernels.linear import linear
from miles_core import pack
from miles_core.assets import TINY
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.parity import Gate
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float32]
ROWS = (1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 128, 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_op_depends_on_the_batch(dtype: torch.dtype) -> None:
    """Shapes of SmolLM2-135M and of Qwen3-0.6B."""
    self_test([(576, 576), (192, 576), (1536, 576), (576, 1536)], 64, 9, 3, 49152, "cuda", dtype)
    self_test([(2048, 1024), (1024, 1024), (3072, 1024), (1024, 3072)], 128, 16, 8, 151936, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_op_of_a_layer_of_experts_depends_on_the_batch(dtype: torch.dtype) -> None:
    """Shapes of Qwen3-30B-A3B, and sizes that divide nothing."""
    experts = {"expert_shapes": [(128, 1536, 2048), (128, 2048, 768)], "top_k": 8}
    self_test([(128, 2048)], 128, 32, 4, 1000, "cuda", dtype, **experts)
    self_test([(60, 100)], 64, 4, 2, 1000, "cuda", dtype, expert_shapes=[(60, 33, 100)], top_k=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1024, 1024), (151936, 896), (33, 100)], ids=str)
def test_linear_over_a_sweep_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight, x = (torch.randn(*size, device="cuda", generator=generator).to(dtype) for size in (shape, (max(ROWS), shape[1])))
    whole = linear(x, weight)
    reference = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((whole.double() - reference).abs() <= (2.0**-8 if dtype is torch.bfloat16 else 1e-6) * size).all()
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:].clone(), weight), whole[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampler_and_trainer_of_the_embedded_policy(dtype: torch.dtype) -> None:
    device = torch.device(DEVICE)
    model, rng, store = hf.load(TINY, device, dtype), np.random.default_rng(0), RouteStore(0, None)
    engine = Engine(model, None, seed=1, num_pages=400, max_batch_tokens=70, max_sequences=24, routing_replay="on")
    prompts = [rng.integers(0, model.config.vocab_size, length).astype(np.int32) for length in (1, 5, 63, 64, 65, 130)]
    requests = [Request(g, s, prompt, SamplingParams(1.0, 0.95, 0, 40, ())) for g, prompt in enumerate(prompts) for s in range(8)]
    completions = engine.generate(requests)
    for completion in completions:
        store.keep(completion.trajectory, completion.routes)
    trajectories = [completion.trajectory for completion in completions]
    gate, compared, moe = Gate("strict", "recompute", synchronous=True), 0, model.config.moe
    fetch = Fetch(trajectories, store, None, moe, device, 1.0)
    for batch in pack.pack(trajectories, 2000):
        batch = fetch.attach(batch.to(device))
        attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        route = TrainRoutes(batch, moe, replay=True, passes=1, balance=BalanceParams())
        logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
        compared += gate.watch(logp_M, batch, 0, route)["train/logp_diff_tokens"].value()
    assert compared == 48 * 40 and gate.difference is None and gate.rerouted is None, (str(gate.difference), gate.rerouted)


def test_a_strict_synchronous_run(tmp_path: Path) -> None:
    """The embedded policy, colocated on one GPU, as a user starts it."""
    command = [ROOT / "launch/run.sh", "--device", "cuda", "--steps", "20", "--eval-prompts", "0", "--run-dir", tmp_path / "run"]
    env = os.environ | {"NPROC": "1", "VIRTUAL_ENV": sys.prefix}
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert run.returncode == 0, run.stdout
    steps = [line for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()) if "train/loss" in line]
    assert len(steps) == 20
    assert all(step["train/logp_diff_max"] == 0.0 and step["train/logp_diff_tokens"] == step["train/tokens"] > 0 for step in steps)
