"""The start-up test of batch invariance, on the model's own shapes: the same rows alone, together and in chunks must give the same bits.

    self_test(linear_shapes, head_dim, num_heads, num_kv_heads, vocab, device, dtype)

For the C++ library and the Triton kernels this holds by construction and the test takes a moment; it would find a compiler that breaks it.
The torch path rests on how this machine's torch adds, so it stays closed until the test has passed in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec

import torch

from kernels.attention import PAGE, allocate_cache, packed_attention, paged_attention, write_kv
from kernels.combine import combine
from kernels.cpu.loader import implementation, torch_on_trial
from kernels.dispatch import fast, on_triton
from kernels.expert_order import expert_order
from kernels.grouped_linear import grouped_linear, pack_experts
from kernels.linear import linear, pack
from kernels.logprob import logprob
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.rope import rope
from kernels.router import SCORING, select, weigh
from kernels.sample import sample
from kernels.swiglu import swiglu

ROWS = 37  # no multiple of any chunk below
CHUNKS = (1, 3, 7, 16, 20)

_passed: set[tuple] = set()


def self_test(
    linear_shapes: Iterable[tuple[int, int]],
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    vocab: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    expert_shapes: Iterable[tuple[int, int, int]] = (),
    top_k: int = 1,
) -> None:
    """Check the implementation in use on `device`; `linear_shapes` are the (outputs, inputs) of the model's weights.

    `expert_shapes` are the (experts, outputs, inputs) of its experts' weights, `top_k` of which a token visits.

    Raises ValueError if a result depends on the batch. Passing opens the torch path for this process.
    """
    assert not fast(), "the self-test is of the invariant ops: call it before use_fast(True)"
    shapes, expert_shapes, device = sorted(set(linear_shapes)), sorted(set(expert_shapes)), torch.device(device)
    name = _implementation(torch.empty(0, device=device))
    key = (name, tuple(shapes), head_dim, num_heads, num_kv_heads, vocab, dtype, tuple(expert_shapes), top_k)
    if key in _passed:
        return
    with torch_on_trial(), torch.no_grad(), torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        for outputs, inputs in shapes:
            _check_linear(outputs, inputs, dtype)
        for width in sorted({width for shape in shapes for width in shape}):
            _check_rowwise(width, head_dim, dtype)
        _check_attention(num_heads, num_kv_heads, head_dim, dtype)
        for num_experts in sorted({shape[0] for shape in expert_shapes}):
            _check_router(num_experts, top_k)
        for shape in expert_shapes:
            _check_experts(*shape, top_k, dtype)
        _check_tokens(vocab, min(inputs for _, inputs in shapes), dtype)
    if name == "torch" and not _passed:
        print("kernels: the torch path passed its self-test: results do not depend on the batch", file=sys.stderr, flush=True)
    _passed.add(key)


def _compare(what: str, op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """op(all rows) must equal op(chunks of rows), put together again."""
    together = op(*inputs)
    for size in CHUNKS:
        apart = torch.cat([op(*rows) for rows in zip(*(x.split(size) for x in inputs), strict=True)])
        _equal(together, apart, f"{what}: {len(together)} rows together and {size} at a time")


def _equal(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    if not torch.equal(a, b):
        name = _implementation(a)
        fix = {
            "torch": "install g++ and set MILES_CPU_KERNELS=cpp",
            "cpp": "that is a fault of kernels/cpu",
            "triton": f"that is a fault of kernels/*/triton.py or of triton {_triton_version()}: try another version, or --device cpu",
        }[name]
        difference = (a.double() - b.double()).abs().max()
        raise ValueError(f"the {name} kernels depend on the batch on this machine: {what} differ by {difference:.3g}; {fix}")


def _implementation(x: torch.Tensor) -> str:
    return "triton" if on_triton(x) else implementation()


def _triton_version() -> str:
    return version("triton") if find_spec("triton") else "(not installed)"


def _normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _check_linear(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, x = _normal(outputs, inputs, dtype=dtype), _normal(ROWS, inputs, dtype=dtype)
    packed = pack(weight)
    _compare(f"linear {outputs} x {inputs}", lambda rows: linear(rows, weight, None, packed), x)
    _equal(linear(x, weight), linear(x, weight, None, packed), f"linear {outputs} x {inputs}: weight packed and not")


def _check_rowwise(width: int, head_dim: int, dtype: torch.dtype) -> None:
    x, y = (_normal(ROWS, width, dtype=dtype) for _ in range(2))
    _compare(f"rmsnorm {width}", lambda rows: rmsnorm(rows, y[0].clone(), 1e-6), x)
    for part in range(2):
        _compare(f"rmsnorm_residual {width}", lambda *rows, part=part: rmsnorm_residual(*rows, y[0].clone(), 1e-6)[part], x, y)
    _compare(f"swiglu {width}", swiglu, x, y)
    angle = torch.randn(ROWS, head_dim // 2)
    _compare(f"rope {head_dim}", rope, _normal(ROWS, 3, head_dim, dtype=dtype), angle.cos(), angle.sin())


def _check_router(num_experts: int, top_k: int) -> None:
    logits = torch.randn(ROWS, num_experts, dtype=torch.float32)
    for scoring in SCORING:
        ids = select(logits, top_k, scoring=scoring)
        _compare(f"the choice of {top_k} of {num_experts} experts", lambda rows, way=scoring: select(rows, top_k, scoring=way), logits)
        settings = {"scoring": scoring, "normalise": True, "scale": 2.5}
        _compare(f"the weights of {top_k} of {num_experts} experts", lambda *rows, s=settings: weigh(*rows, **s), logits, ids)


def _check_experts(num_experts: int, outputs: int, inputs: int, top_k: int, dtype: torch.dtype) -> None:
    """From tokens to the order of their experts and back, through one weight each."""
    weight, x = _normal(num_experts, outputs, inputs, dtype=dtype), _normal(ROWS, inputs, dtype=dtype)
    ids = torch.rand(ROWS, num_experts).argsort(1)[:, :top_k].contiguous()
    mix, packed = torch.rand(ROWS, top_k, dtype=torch.float32), pack_experts(weight)

    def layer(x, ids, mix, packed=packed):
        order, place, offsets = expert_order(ids, num_experts)
        return combine(grouped_linear(x, weight, offsets, order // top_k, packed), mix, place)

    what = f"experts {num_experts} x {outputs} x {inputs}"
    _compare(what, layer, x, ids, mix)
    _equal(layer(x, ids, mix), layer(x, ids, mix, None), f"{what}: weights packed and not")


def _check_attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """The packed forward of training, prefill in chunks and decode: the same bits for every query."""
    length = PAGE + ROWS
    q, k, v = (_normal(length, heads, head_dim, dtype=dtype) for heads in (num_heads, num_kv_heads, num_kv_heads))
    scale = head_dim**-0.5
    packed = packed_attention(q, k, v, torch.tensor([0, length], dtype=torch.int32), scale)
    doubled = packed_attention(*(torch.cat([x[:5], x]) for x in (q, k, v)), torch.tensor([0, 5, 5 + length], dtype=torch.int32), scale)
    _equal(packed, doubled[5:], "attention of one sequence alone and packed after another")
    cache = allocate_cache(1, 3, num_kv_heads, head_dim, q.device, dtype)
    pages = torch.tensor([[2, 0]], dtype=torch.int32)
    position = torch.arange(length)
    write_kv(k, v, cache.k[0], cache.v[0], pages[0].long()[position // PAGE] * PAGE + position % PAGE)
    for size in CHUNKS:
        out = []
        for start in range(0, length, size):
            stop = min(start + size, length)
            lengths = (torch.tensor([0, stop - start], dtype=torch.int32), torch.tensor([stop], dtype=torch.int32))
            out.append(paged_attention(q[start:stop], cache.k[0], cache.v[0], pages, *lengths, scale))
        _equal(packed, torch.cat(out), f"attention packed and in chunks of {size}")


def _check_tokens(vocab: int, width: int, dtype: torch.dtype) -> None:
    """Log-probs do not depend on the chunk, and are those of the sampler."""
    rows = ROWS // 3  # a vocabulary is wide
    hidden, weight = _normal(rows, width, dtype=dtype), (torch.randn(vocab, width) * width**-0.5).to(dtype)
    settings = (torch.full((rows,), 0.7), torch.full((rows,), 0.9), torch.full((rows,), min(50, vocab)))
    packed = pack(weight)
    token, logp = sample(linear(hidden, weight, None, packed, wide=True), *settings, torch.rand(rows, dtype=torch.float64))

    def score(chunk, *inputs):
        return logprob(chunk, weight, *inputs, packed=packed)[0]

    _compare(f"log-probs over {vocab}", score, hidden, token, *settings)
    _equal(logp, score(hidden, token, *settings), "the log-probs of sampler and trainer")
