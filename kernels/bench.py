"""The price of invariance: every op and a whole model, against plain torch.

    OMP_NUM_THREADS=1 python -m kernels.bench [--seconds 0.5] [--only model] [--device cuda]

Shapes of SmolLM2-135M, float32 on a CPU and bfloat16 on a GPU. Every line is a pair of medians taken in turns in this run: invariant (ours)
and fast (torch, whose results depend on the batch), with weights that are cold (a rotation of copies larger than the caches; a whole model
is larger by itself). The price is invariant / fast: below 1, invariance costs nothing. The share is the better of two: of the memory
bandwidth and of the matrix peak, both measured first (the best of five medians).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import PAGE, allocate_cache, packed_attention, paged_attention, write_kv
from kernels.dispatch import describe
from kernels.expert_order import expert_order
from kernels.grouped_linear import grouped_linear, pack_experts
from kernels.linear import PackedWeight, linear, pack
from kernels.rmsnorm import rmsnorm, rmsnorm_residual
from kernels.rope import rope
from kernels.router import select, weigh
from kernels.sample import sample
from kernels.swiglu import swiglu

D, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
EXPERTS, TOP_K, EXPERT_FFN = 32, 4, 512  # a layer of experts; SmolLM2 has none
CONTEXT = 1000  # keys that a decoded token attends to
COLD = 256 << 20  # bytes of weights in a rotation


def size(*shape: int) -> int:
    """Bytes of a tensor of this shape in the dtype that the model computes in."""
    return math.prod(shape) * torch.get_default_dtype().itemsize


def medians(seconds: float, *functions: Callable[[], object]) -> list[float]:
    """Median time of each function in seconds, all of them called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 6:
        for function, list_ in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if torch.get_default_device().type == "cuda":
                torch.cuda.synchronize()
            list_.append(time.perf_counter() - start)
    return [statistics.median(list_[1:]) for list_ in times]


class Report:
    def __init__(self, seconds: float):
        self.seconds = seconds
        device, side = torch.get_default_device(), 1024 if torch.get_default_device().type == "cpu" else 8192
        matrix, vector = torch.randn(side, side), torch.ones(COLD // size(1))
        gemm, read = (min(medians(seconds, lambda: matrix @ matrix, vector.sum)[i] for _ in range(5)) for i in (0, 1))
        self.flops, self.bandwidth = 2 * side**3 / gemm, COLD / read
        print(describe(device, torch.get_default_dtype(), HEAD_DIM))
        print(f"matrix peak {self.flops / 1e9:.0f} GFLOP/s, reading memory {self.bandwidth / 1e9:.1f} GB/s\n")
        print(f"{'op':28} {'M':>4} {'ours us':>10} {'torch us':>10} {'price':>6}  ours reaches")

    def line(self, op: str, rows: int, ours: Callable, plain: Callable, flops: float, nbytes: float) -> None:
        our_time, torch_time = medians(self.seconds, ours, plain)
        shares = {"of matrix peak": flops / our_time / self.flops, "of memory bandwidth": nbytes / our_time / self.bandwidth}
        best = max(shares, key=shares.__getitem__)
        line = f"{op:28} {rows:4} {our_time * 1e6:10.1f} {torch_time * 1e6:10.1f} {our_time / torch_time:6.2f}  {shares[best]:.0%} {best}"
        print(line, flush=True)


def bench_linear(report: Report, name: str, outputs: int, inputs: int, sizes: list[int]) -> None:
    copies = max(1, COLD // size(outputs, inputs))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    ready = cycle([(weight, pack(weight)) for weight in weights])
    plain, unpacked = cycle(weights), cycle(weights)

    def ours(x: torch.Tensor) -> torch.Tensor:
        weight, packed = next(ready)
        return linear(x, weight, None, packed)

    for rows in sizes:
        x = torch.randn(rows, inputs)
        work = 2 * rows * outputs * inputs, size(outputs, inputs)
        report.line(f"linear {name}", rows, lambda x=x: ours(x), lambda x=x: F.linear(x, next(plain)), *work)
        if rows >= 512:
            report.line(
                f"linear {name}, unpacked", rows, lambda x=x: linear(x, next(unpacked)), lambda x=x: F.linear(x, next(plain)), *work
            )


def bench_rowwise(report: Report, rows: int) -> None:
    gate, up, x, weight = torch.randn(rows, FFN), torch.randn(rows, FFN), torch.randn(rows, D), torch.randn(D)
    q, angle = torch.randn(rows, HEADS, HEAD_DIM), torch.randn(rows, HEAD_DIM // 2)
    cos, sin = angle.cos().float(), angle.sin().float()

    report.line("rmsnorm", rows, lambda: rmsnorm(x, weight, 1e-5), lambda: F.rms_norm(x, (D,), weight, 1e-5), 0, 2 * size(rows, D))
    report.line(
        "rmsnorm of x + residual",
        rows,
        lambda: rmsnorm_residual(x, x, weight, 1e-5),
        lambda: torch_norm_residual(x, x, weight),
        0,
        4 * size(rows, D),
    )
    report.line("rope", rows, lambda: rope(q, cos, sin), lambda: torch_rope(q, cos, sin), 0, 2 * size(rows, D))
    report.line("swiglu", rows, lambda: swiglu(gate, up), lambda: F.silu(gate) * up, 0, 3 * size(rows, FFN))


def bench_decode_attention(report: Report, sequences: int) -> None:
    blocks = -(-CONTEXT // PAGE)
    cache = allocate_cache(1, sequences * blocks, KV_HEADS, HEAD_DIM, torch.get_default_device(), torch.get_default_dtype())
    cache.k.normal_(), cache.v.normal_()
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    starts, contexts = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), CONTEXT, dtype=torch.int32)
    q, scale = torch.randn(sequences, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    k, v = torch.randn(2, sequences, KV_HEADS, CONTEXT, HEAD_DIM)
    report.line(
        f"attention, {CONTEXT} keys",
        sequences,
        lambda: paged_attention(q, cache.k[0], cache.v[0], table, starts, contexts, scale),
        lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True),
        4 * sequences * CONTEXT * D,
        2 * size(sequences, CONTEXT, KV_HEADS, HEAD_DIM),
    )


def bench_prefill_attention(report: Report, tokens: int) -> None:
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, scale = torch.tensor([0, tokens], dtype=torch.int32), HEAD_DIM**-0.5

    def plain() -> torch.Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)

    report.line("attention, prefill", tokens, lambda: packed_attention(q, k, v, starts, scale), plain, 2 * tokens**2 * D, 0)


def bench_sample(report: Report, rows: int) -> None:
    logits, ones = torch.randn(rows, VOCAB, dtype=torch.float32) * 2, torch.ones(rows, dtype=torch.float32)
    off = torch.zeros(rows, dtype=torch.int64)
    noise = torch.rand(rows, dtype=torch.float64)

    def plain() -> torch.Tensor:
        logp = logits.log_softmax(1)
        return logp.gather(1, torch.multinomial(logp.exp(), 1))

    for name, top_p, top_k in (("", 1.0, 0), (", top-p 0.9", 0.9, 0), (", top-k 50", 1.0, 50)):
        report.line(
            f"sample{name}", rows, lambda p=top_p, k=top_k: sample(logits, ones, ones * p, off + k, noise), plain, 0, 4 * logits.numel()
        )


def bench_router(report: Report, tokens: int) -> None:
    logits = torch.randn(tokens, EXPERTS, dtype=torch.float32)

    def ours() -> torch.Tensor:
        return weigh(logits, select(logits, TOP_K), scoring="softmax", normalise=True, scale=1.0)

    def plain() -> torch.Tensor:
        scores = logits.softmax(1).topk(TOP_K).values
        return scores / scores.sum(1, keepdim=True)

    report.line(f"router, {TOP_K} of {EXPERTS}", tokens, ours, plain, 0, size(tokens, EXPERTS))


def bench_experts(report: Report, tokens: int) -> None:
    """One matrix of a layer of experts: each token's row times the weights of its experts, the rows in the order of the experts."""
    weights = [torch.randn(EXPERTS, EXPERT_FFN, D) for _ in range(max(1, COLD // size(EXPERTS, EXPERT_FFN, D)))]
    ready, plain_weights = cycle([(weight, pack_experts(weight)) for weight in weights]), cycle(weights)
    x, ids = torch.randn(tokens, D), select(torch.randn(tokens, EXPERTS, dtype=torch.float32), TOP_K)
    order, _, offsets = expert_order(ids, EXPERTS)
    rows = order // TOP_K

    def ours() -> torch.Tensor:
        weight, packed = next(ready)
        return grouped_linear(x, weight, offsets, rows, packed)

    def plain() -> torch.Tensor:
        parts = x[rows].split(offsets.diff().tolist())
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, next(plain_weights), strict=True)])

    flops, touched = 2 * len(rows) * EXPERT_FFN * D, int(offsets.diff().count_nonzero())
    report.line(f"experts {EXPERTS} x {EXPERT_FFN}x{D}", tokens, ours, plain, flops, size(touched, EXPERT_FFN, D))


class Matrix(NamedTuple):
    weight: torch.Tensor
    packed: PackedWeight | None


class Layer(NamedTuple):
    norm: torch.Tensor
    qkv: tuple[Matrix, Matrix, Matrix]
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


class Ops(NamedTuple):
    """What the two sides of a whole model do differently."""

    linear: Callable[[torch.Tensor, Matrix], torch.Tensor]
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    norm_residual: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_rope(x_TNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_TNH.float().chunk(2, -1)
    return torch.cat([first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]], -1).to(x_TNH.dtype)


def torch_norm_residual(x_MD: torch.Tensor, residual_MD: torch.Tensor, weight_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sum_MD = x_MD + residual_MD
    return F.rms_norm(sum_MD, (D,), weight_D, 1e-5), sum_MD


def ours_with(attend: Callable) -> Ops:
    norms = lambda x, w: rmsnorm(x, w, 1e-5), lambda x, r, w: rmsnorm_residual(x, r, w, 1e-5)
    return Ops(lambda x, m: linear(x, m.weight, None, m.packed), *norms, rope, swiglu, attend)


def torch_with(attend: Callable) -> Ops:
    norms = lambda x, w: F.rms_norm(x, (D,), w, 1e-5), torch_norm_residual
    return Ops(lambda x, m: F.linear(x, m.weight), *norms, torch_rope, lambda g, u: F.silu(g) * u, attend)


def run_model(ops: Ops, layers: list[Layer], head: Matrix, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(layers):
        normed = ops.norm(x, w.norm)
        q, k, v = (ops.linear(normed, m).view(len(x), -1, HEAD_DIM) for m in w.qkv)
        attended = ops.linear(ops.attend(i, ops.rope(q, cos, sin), ops.rope(k, cos, sin), v).reshape(len(x), D), w.out)
        normed, x = ops.norm_residual(attended, x, w.norm)
        x = x + ops.linear(ops.swiglu(ops.linear(normed, w.gate), ops.linear(normed, w.up)), w.down)
    return ops.linear(ops.norm(x[-64:], layers[0].norm), head)  # logits of at most 64 rows


def make_model(packed: bool) -> tuple[list[Layer], Matrix]:
    def matrix(outputs: int, inputs: int) -> Matrix:
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        return Matrix(weight, pack(weight) if packed else None)

    def layer() -> Layer:
        kv = KV_HEADS * HEAD_DIM
        qkv = (matrix(D, D), matrix(kv, D), matrix(kv, D))
        return Layer(torch.ones(D), qkv, matrix(D, D), matrix(FFN, D), matrix(FFN, D), matrix(D, FFN))

    return [layer() for _ in range(LAYERS)], matrix(VOCAB, D)


def bench_decode(report: Report, layers: list[Layer], head: Matrix, sequences: int, context: int = 200) -> None:
    """One token of each sequence, the last of `context`."""
    blocks, scale = -(-context // PAGE), HEAD_DIM**-0.5
    cache = allocate_cache(LAYERS, sequences * blocks, KV_HEADS, HEAD_DIM, torch.get_default_device(), torch.get_default_dtype())
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    starts, contexts = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), context, dtype=torch.int32)
    slots = table[:, -1].long() * PAGE + (context - 1) % PAGE
    keys, values = torch.zeros(2, LAYERS, sequences, KV_HEADS, context, HEAD_DIM)

    def paged(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        write_kv(k, v, cache.k[i], cache.v[i], slots)
        return paged_attention(q, cache.k[i], cache.v[i], table, starts, contexts, scale)

    def dense(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys[i, :, :, -1], values[i, :, :, -1] = k, v
        return F.scaled_dot_product_attention(q[:, :, None], keys[i], values[i], scale=scale, enable_gqa=True)

    x, angle = torch.randn(sequences, D), torch.randn(sequences, HEAD_DIM // 2)
    cos, sin = angle.cos().float(), angle.sin().float()
    sides = [lambda ops=ops: run_model(ops, layers, head, x, cos, sin) for ops in (ours_with(paged), torch_with(dense))]
    weights = sum(m.weight.numel() for w in layers for m in (*w.qkv, w.out, w.gate, w.up, w.down)) + head.weight.numel()
    report.line("model, decode", sequences, *sides, 2 * weights * sequences, size(weights))


def bench_forward(report: Report, layers: list[Layer], head: Matrix, tokens: int) -> None:
    """The packed forward of training: weights are not packed beforehand."""
    lengths, scale = [tokens // 4] * 4, HEAD_DIM**-0.5
    starts = torch.tensor([0, *lengths]).cumsum(0).int()

    def dense(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(4, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)

    x, angle = torch.randn(tokens, D), torch.randn(tokens, HEAD_DIM // 2)
    attends = (ours_with(lambda _, q, k, v: packed_attention(q, k, v, starts, scale)), torch_with(dense))
    sides = [lambda ops=ops: run_model(ops, layers, head, x, angle.cos().float(), angle.sin().float()) for ops in attends]
    weights = sum(m.weight.numel() for w in layers for m in (*w.qkv, w.out, w.gate, w.up, w.down))
    report.line("model, packed forward", tokens, *sides, 2 * (weights * tokens + 64 * head.weight.numel()), size(weights))


def bench_model(report: Report) -> None:
    layers, head = make_model(packed=True)
    for sequences in (1, 8, 32):
        bench_decode(report, layers, head, sequences)
    bench_forward(report, *make_model(packed=False), 512)


def bench_ops(report: Report) -> None:
    sizes = [1, 8, 32, 512]
    for name, outputs, inputs in (("q, o", D, D), ("k, v", KV_HEADS * HEAD_DIM, D), ("gate, up", FFN, D), ("down", D, FFN)):
        bench_linear(report, f"{name} {outputs}x{inputs}", outputs, inputs, sizes)
    bench_linear(report, f"head {VOCAB}x{D}", VOCAB, D, sizes[:3])
    for rows in sizes:
        bench_rowwise(report, rows)
    for rows in sizes[:3]:
        bench_decode_attention(report, rows)
    for tokens in (128, 512):
        bench_prefill_attention(report, tokens)
    for rows in sizes[:3]:
        bench_sample(report, rows)
    for rows in sizes:
        bench_router(report, rows)
        bench_experts(report, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="time given to each pair (default 0.5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=("ops", "model"), help="half of it")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if args.device == "cuda" else torch.float32)
    torch.set_default_device(args.device)
    with torch.no_grad():
        report = Report(args.seconds)
        if args.only != "model":
            bench_ops(report)
        if args.only != "ops":
            bench_model(report)


if __name__ == "__main__":
    main()
