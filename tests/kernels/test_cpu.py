"""kernels/cpu: build, cache, choice of implementation, self-test. Run: pytest tests/kernels/test_cpu.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.attention import packed_attention
from kernels.combine import combine
from kernels.combine import ref as combine_ref
from kernels.cpu import implementation, loader
from kernels.expert_order import expert_order
from kernels.grouped_linear import grouped_linear, pack_experts
from kernels.grouped_linear import ref as grouped_linear_ref
from kernels.invariance import self_test
from kernels.linear import linear
from kernels.linear import ref as linear_ref
from kernels.logprob import logprob
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.router import ref as router_ref
from kernels.router import select, weigh
from kernels.sample import sample
from kernels.swiglu import swiglu
from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.model.attend import PackedAttend

ROOT = Path(__file__).parents[2]
IMPLEMENTATION = "from kernels.cpu import implementation, load; print(implementation(), load())"


def python(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that four processes filled at the same time."""
    directory = tmp_path_factory.mktemp("cache")
    processes = [python(IMPLEMENTATION, XDG_CACHE_HOME=str(directory), MILES_CPU_KERNELS="cpp") for _ in range(4)]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.startswith("cpp <CDLL"), err
        said.append(err.count("kernels: compiling"))
    assert sorted(said) == [0, 0, 0, 1], "one compiles, the others wait for it"
    return directory


def test_processes_that_start_together_build_once(cache):
    files = sorted(path.suffix for path in (cache / "miles").iterdir())
    assert files == [".lock", ".sha256", ".so"]


def test_a_damaged_library_is_built_again(cache):
    """One flipped bit is enough."""
    (library,) = (cache / "miles").glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    out, err = python(IMPLEMENTATION, XDG_CACHE_HOME=str(cache)).communicate(timeout=120)
    assert out.startswith("cpp <CDLL") and "is damaged, building it again" in err
    assert library.read_bytes() == whole


def test_without_a_compiler(tmp_path):
    """cpp is an error, auto says that it is slower, and the torch path stays closed until its self-test has passed."""
    bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    out, err = python("from kernels.cpu import implementation; implementation()", MILES_CPU_KERNELS="cpp", **bare).communicate(timeout=60)
    assert "ValueError: MILES_CPU_KERNELS=cpp, but there is no C++ compiler (g++); install g++" in err
    code = """
import torch
from kernels.cpu import implementation
from kernels.invariance import self_test
from kernels.swiglu import swiglu
x = torch.ones(2)
try:
    swiglu(x, x)
except AssertionError as error:
    print(error)
for _ in range(2):
    self_test([(24, 8)], head_dim=8, num_heads=2, num_kv_heads=1, vocab=16)
print(implementation(), swiglu(x, x).tolist())
"""
    out, err = python(code, MILES_CPU_KERNELS="auto", **bare).communicate(timeout=60)
    assert "first call kernels.invariance.self_test" in out and "torch [0.731" in out, (out, err)
    assert err.count("using the torch path, several times slower") == err.count("passed its self-test") == 1, err


def test_a_wrong_choice_is_refused():
    out, err = python("from kernels.cpu import implementation; implementation()", MILES_CPU_KERNELS="fast").communicate(timeout=60)
    assert "ValueError: MILES_CPU_KERNELS=fast: must be cpp, torch or auto" in err


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    out, err = python(IMPLEMENTATION, XDG_CACHE_HOME=str(tmp_path / "file"), MILES_CPU_KERNELS="cpp").communicate(timeout=60)
    assert "ValueError: cannot write" in err and "set XDG_CACHE_HOME" in err


def test_self_test_passes(impl):
    shapes = {"expert_shapes": [(6, 50, 40), (6, 40, 25)], "top_k": 3}
    self_test([(96, 40), (40, 96)], head_dim=24, num_heads=4, num_kv_heads=2, vocab=99, **shapes)


def test_self_test_refuses_an_op_that_depends_on_the_batch(monkeypatch):
    before = implementation()
    loader.select("torch")
    right = linear_ref.linear
    monkeypatch.setattr(linear_ref, "linear", lambda x, *rest: right(x, *rest) + 1e-6 * len(x))
    try:
        with pytest.raises(ValueError, match="depend on the batch on this machine: linear 31 x 8"):
            self_test([(31, 8)], head_dim=8, num_heads=2, num_kv_heads=1, vocab=16)
    finally:
        loader.select(before)


def test_self_test_refuses_experts_that_depend_on_the_batch(monkeypatch):
    before = implementation()
    loader.select("torch")
    for module, name, said in (
        (grouped_linear_ref, "grouped_linear", "experts 6 x 9 x 8"),
        (combine_ref, "combine", "experts 6 x 9 x 8"),
        (router_ref, "weigh", "the weights of 2 of 6 experts"),
        (router_ref, "select", "the choice of 2 of 6 experts"),
    ):
        right = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda x, *rest, right=right: right(x, *rest) + len(x) % 5)
            with pytest.raises(ValueError, match=f"depend on the batch on this machine: {said}"):
                self_test([(24, 8)], head_dim=8, num_heads=2, num_kv_heads=1, vocab=16, expert_shapes=[(6, 9, 8)], top_k=2)
    loader.select(before)


@torch.no_grad()
def logits_of_the_embedded_policy() -> torch.Tensor:
    """Two sequences packed, every position."""
    model, lengths = hf.load(TINY), [90, 37]
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.arange(len(positions)) * 7 % model.config.vocab_size
    attend = PackedAttend(torch.tensor([0, 90, 127], dtype=torch.int32), model.config.head_dim**-0.5)
    return model(tokens, positions, attend, torch.arange(len(positions)))


def experts() -> list[torch.Tensor]:
    """The ops of a layer of experts: softmax and sigmoid, groups, odd widths, logits that are not numbers."""
    logits, bias, x = torch.randn(40, 60) * 3, torch.randn(60) / 8, torch.randn(40, 300)
    logits[3, 7], logits[4] = torch.nan, torch.inf
    weight = torch.randn(60, 70, 300)
    results = []
    for scoring in ("softmax", "sigmoid"):
        ids = select(logits, 5, scoring=scoring, bias_E=bias, num_groups=6, top_groups=3)
        weights = weigh(logits, ids, scoring=scoring, normalise=True, scale=2.5)
        order, place, offsets = expert_order(ids, 60)
        y = grouped_linear(x, weight, offsets, order // 5, pack_experts(weight))
        results += [ids, weights, order, place, offsets, y, grouped_linear(x, weight, offsets, order // 5), combine(y, weights, place)]
    return [result.nan_to_num(7.0) for result in results]


def everything() -> list[torch.Tensor]:
    """Each op, and a whole model."""
    torch.manual_seed(0)
    x, weight, head = torch.randn(45, 300), torch.randn(200, 300), torch.randn(301, 300)
    y = linear(x, weight)
    q, k, v = torch.randn(150, 6, 40), torch.randn(150, 2, 40), torch.randn(150, 2, 40)
    settings = (torch.full((45,), 0.8), torch.full((45,), 0.95), torch.full((45,), 30))
    token, logp = sample(linear(x, head), *settings, torch.rand(45, dtype=torch.float64))
    scores = logprob(x, head, token, *settings)
    attention = packed_attention(q, k, v, torch.tensor([0, 20, 150], dtype=torch.int32), 0.2)
    norms = rmsnorm(x, x[0], 1e-6), *rmsnorm_residual(x, x.roll(1), x[0], 1e-6)
    return [y, *norms, swiglu(y, -y), attention, token, logp, *scores, *experts(), logits_of_the_embedded_policy()]


BUILDS = {"avx2": ["-march=haswell"], "scalar": ["-mfma", "-DSCALAR", "-O1"]}


@pytest.mark.parametrize("build", BUILDS)
def test_bits_do_not_depend_on_the_vector_width(build, monkeypatch, tmp_path):
    """The library as this processor has it (AVX-512 where it can), built for AVX2, and as plain scalar code."""
    native = everything()
    flags = [flag for flag in loader.FLAGS if flag != "-march=native"] + BUILDS[build]
    monkeypatch.setattr(loader, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "_library", loader._open_library())
    for ours, other in zip(native, everything(), strict=True):
        assert torch.equal(ours, other)
