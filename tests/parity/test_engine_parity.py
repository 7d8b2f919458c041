"""One answer, one set of bits: alone, in company, in chunks, preempted, from cached pages, after new weights, and in the trainer.

    python -m pytest tests/parity/test_engine_parity.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import sample as ops
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig

LLAMA = ModelConfig(
    vocab_size=300, hidden_size=48, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6,
    rope_theta=1e4, rope_scaling=None, max_position=512, tie_embeddings=True, qkv_bias=False, qk_norm=False, family="llama",
)  # fmt: skip
QWEN3 = ModelConfig(
    vocab_size=517, hidden_size=64, intermediate_size=200, num_layers=3, num_heads=4, num_kv_heads=1, head_dim=24, rms_norm_eps=1e-6,
    rope_theta=1e6, rope_scaling=None, max_position=512, tie_embeddings=False, qkv_bias=False, qk_norm=True, family="qwen3",
)  # fmt: skip
MOE = replace(QWEN3, family="qwen3_moe", moe=MoEConfig(num_experts=7, top_k=3, expert_size=52, layers=(1, 2), normalise=False))
GLM = replace(
    LLAMA, family="glm4_moe", rotary_dim=8, qk_norm=True,
    moe=MoEConfig(8, 2, 40, (1,), scoring="sigmoid", num_groups=4, top_groups=2, correction_bias=True, shared_size=40),
)  # fmt: skip
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "qwen3-moe": MOE, "glm4-moe": GLM}
SEED = 11


def make_model(config: ModelConfig, seed: int = 0):
    torch.manual_seed(seed)
    model = hf.build(config, "cpu")
    with torch.no_grad():
        for name, p in named_weights(model):
            p.fill_(1.0) if "norm" in name else p.normal_(0, 0.12)
    return model


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def model(request):
    return make_model(request.param)


def make_engine(model, **changes) -> Engine:
    return Engine(model, None, **{"seed": SEED, "num_pages": 200, "max_batch_tokens": 4096, "max_sequences": 64, **changes})


def make_requests() -> list[Request]:
    """Seven prompts, some with a common first page, around the page size; each way to sample; two samples of each."""
    rng = np.random.default_rng(0)
    first_page = rng.integers(0, 300, 64)
    prompts = [rng.integers(0, 300, length) for length in (1, 20, 63, 65)]
    prompts += [np.append(first_page, rng.integers(0, 300, length)) for length in (0, 6, 70)]
    ways = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 12), (0.7, 0.9, 40), (0.0, 1.0, 0)]
    return [
        Request(group, sample, prompt.astype(np.int32), SamplingParams(*ways[(group + sample) % len(ways)], 75, ()))
        for group, prompt in enumerate(prompts)
        for sample in range(2)
    ]


@pytest.fixture(scope="module")
def alone(model):
    """Every request in an engine of its own."""
    return [make_engine(model).generate([r])[0].trajectory for r in make_requests()]


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a.tokens, b.tokens), f"group {a.group} sample {a.sample}: other tokens"
        assert np.array_equal(a.logp_roll, b.logp_roll), f"group {a.group} sample {a.sample}: other log-probs"


def run(engine: Engine):
    return [c.trajectory for c in engine.generate(make_requests())]


def packed(model, trajectories):
    """The trainer's forward over whole trajectories, packed: (log-probs of the sampled tokens, the tokens that their noise draws)."""
    lengths = [len(t.tokens) for t in trajectories]
    starts = np.cumsum([0, *lengths])
    tokens_T = torch.from_numpy(np.concatenate([t.tokens for t in trajectories]).astype(np.int64))
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    at = [np.flatnonzero(t.loss_mask) for t in trajectories]
    rows_M = torch.from_numpy(np.concatenate([start + a - 1 for start, a in zip(starts[:-1], at, strict=True)]))
    columns = {
        name: torch.from_numpy(np.concatenate([np.full(len(a), getattr(t, name), dtype) for t, a in zip(trajectories, at, strict=True)]))
        for name, dtype in (("group", "int64"), ("sample", "int64"), ("temperature", "float32"), ("top_p", "float32"), ("top_k", "int64"))
    }
    sampling = columns["temperature"], columns["top_p"], columns["top_k"]
    attend = PackedAttend(torch.from_numpy(starts.astype(np.int32)), model.config.head_dim**-0.5)
    logp_M, _ = model(tokens_T, positions_T, attend, rows_M, tokens_T[rows_M + 1], sampling)
    with torch.no_grad():
        logits_MV = model(tokens_T, positions_T, attend, rows_M)
    noise_M = ops.uniform(SEED, columns["group"], columns["sample"], positions_T[rows_M] + 1)
    drawn_M, _ = ops.sample(logits_MV, *sampling, noise_M)
    return logp_M.detach().numpy(), drawn_M.numpy()


def sampled(trajectories, name: str) -> np.ndarray:
    return np.concatenate([getattr(t, name)[t.loss_mask == 1] for t in trajectories])


def test_in_company(model, alone):
    engine = make_engine(model)
    assert_same(run(engine), alone)
    assert engine.counters.prompt_tokens_cached > 0


@pytest.mark.parametrize("max_batch_tokens", [5, 33])
def test_chunked_prefill(model, alone, max_batch_tokens):
    assert_same(run(make_engine(model, max_batch_tokens=max_batch_tokens)), alone)


@pytest.mark.parametrize("max_batch_tokens", [16, 4096])
def test_preemption(model, alone, max_batch_tokens):
    engine = make_engine(model, num_pages=5, max_batch_tokens=max_batch_tokens)
    assert_same(run(engine), alone)
    assert engine.counters.preemptions >= 3 and engine.counters.tokens_recomputed > 30


def test_cached_prefix(model, alone):
    engine = make_engine(model)
    run(engine)
    again = run(engine)
    assert_same(again, alone)
    assert all(t.cached == t.turns[0] - 1 or t.cached == t.turns[0] for t in again), "the first time around left every prompt in the tree"


def test_the_trainers_forward_has_the_samplers_bits(model, alone):
    logp_M, drawn_M = packed(model, alone)
    assert np.array_equal(logp_M, sampled(alone, "logp_roll"))
    assert np.array_equal(drawn_M, sampled(alone, "tokens"))


def interrupted(model, mode: str, steps: int, change, **changes):
    """Run `steps` steps, change the weights in place, finish. Returns trajectories in order of requests, and the engine."""
    engine, done = make_engine(model, **changes), {}
    for r in make_requests():
        engine.add(r)
    for step in range(10**6):
        if step == steps:
            change()
            engine.set_version(1, mode)
        if not engine.num_unfinished:
            break
        done.update((c.number, c.trajectory) for c in engine.step())
    return [done[i] for i in range(len(done))], engine


@pytest.mark.parametrize("max_batch_tokens", [40, 4096])
def test_recompute_under_the_same_weights_changes_nothing(model, alone, max_batch_tokens):
    trajectories, engine = interrupted(model, "recompute", 12, lambda: None, max_batch_tokens=max_batch_tokens)
    assert_same(trajectories, alone)
    assert engine.counters.tokens_recomputed > 100


def perturb(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.03)


@pytest.mark.parametrize("changes", [{}, {"max_batch_tokens": 40}, {"num_pages": 5}], ids=["roomy", "chunked", "preempted"])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_after_recompute_every_token_has_the_bits_of_its_version(config, changes):
    model = make_model(config)
    trajectories, engine = interrupted(model, "recompute", 30, lambda: perturb(model), **changes)
    version_M = np.concatenate([t.version_M for t in trajectories])
    logp_M, tokens_M = sampled(trajectories, "logp_roll"), sampled(trajectories, "tokens")
    assert 50 < version_M.sum() < len(version_M) - 50, "both versions must have sampled"
    assert engine.counters.tokens_recomputed > 0
    assert any(len(t.version) == 2 for t in trajectories), "a trajectory spans both"
    for version, weights in ((1, model), (0, make_model(config))):
        expected_M, drawn_M = packed(weights, trajectories)
        mine = version_M == version
        assert np.array_equal(expected_M[mine], logp_M[mine]) and np.array_equal(drawn_M[mine], tokens_M[mine])
        assert (expected_M[~mine] != logp_M[~mine]).mean() > 0.5, "the two versions must be told apart"


def test_keep_goes_on_with_old_kv_and_new_requests_do_not_see_it():
    model = make_model(LLAMA)
    trajectories, engine = interrupted(model, "keep", 30, lambda: perturb(model))
    assert engine.counters.tokens_recomputed == 0
    version_M, logp_M = np.concatenate([t.version_M for t in trajectories]), sampled(trajectories, "logp_roll")
    old_M, _ = packed(make_model(LLAMA), trajectories)
    new_M, _ = packed(model, trajectories)
    assert np.array_equal(old_M[version_M == 0], logp_M[version_M == 0])
    assert (new_M[version_M == 1] != logp_M[version_M == 1]).mean() > 0.9, "KV of the old weights must show"
    later = run(engine)
    assert [t.cached for t in later if t.sample == 0 and t.turns[0] <= 64] == [0, 0, 0, 0]
    assert np.array_equal(packed(model, later)[0], sampled(later, "logp_roll"))


def test_with_keep_too_a_prompt_is_of_one_version():
    """What was sampled from the new weights alone has their bits, also where the update came between two chunks of its prompt."""
    recomputed = 0
    for steps in range(1, 9):
        model = make_model(LLAMA)
        trajectories, engine = interrupted(model, "keep", steps, lambda model=model: perturb(model), max_batch_tokens=40)
        new = [t for t in trajectories if (t.version_M == 1).all()]
        assert len(new) > 1 and np.array_equal(packed(model, new)[0], sampled(new, "logp_roll"))
        recomputed += engine.counters.tokens_recomputed
    assert recomputed > 100


def test_the_prefix_tree_serves_one_version_only():
    model = make_model(QWEN3)
    engine = make_engine(model)
    for version in range(3):
        if version:
            perturb(model)
            engine.set_version(version, "recompute")
        for hit in (False, True):
            trajectories = run(engine)
            assert hit == (trajectories[0].cached == trajectories[0].turns[0] - 1 and trajectories[2].cached > 0)
            assert np.array_equal(packed(model, trajectories)[0], sampled(trajectories, "logp_roll"))
