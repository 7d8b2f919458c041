"""CPU kernels against plain torch, SmolLM2-135M shapes, one thread: `python tests/bench/bench_kernels.py [--seconds 0.5]`.

Every line is a pair of medians taken in turns in this run, with weights that are cold (a rotation of copies larger than the caches), and
the better of two shares: of the memory bandwidth and of the sgemm peak, both measured first (the best of five medians). Ratios above 1:
ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from kernels.attention import PAGE, allocate_cache, packed_attention, paged_attention
from kernels.cpu import implementation
from kernels.linear import linear, pack
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope
from kernels.sample import sample
from kernels.swiglu import swiglu

D, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
CONTEXT = 1000  # keys that a decoded token attends to
COLD = 256 << 20  # bytes of weights in a rotation


def medians(seconds: float, *functions: Callable[[], object]) -> list[float]:
    """Median time of each function in seconds, all of them called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 6:
        for function, list_ in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            list_.append(time.perf_counter() - start)
    return [statistics.median(list_[1:]) for list_ in times]


class Report:
    def __init__(self, seconds: float):
        self.seconds = seconds
        matrix, vector = torch.randn(1024, 1024), torch.ones(COLD // 4)
        gemm, read = (min(medians(seconds, lambda: matrix @ matrix, vector.sum)[i] for _ in range(5)) for i in (0, 1))
        self.flops, self.bandwidth = 2 * 1024**3 / gemm, COLD / read
        print(f"kernels: {implementation()}; sgemm {self.flops / 1e9:.0f} GFLOP/s, reading memory {self.bandwidth / 1e9:.1f} GB/s\n")
        print(f"{'op':28} {'M':>4} {'ours us':>10} {'torch us':>10} {'torch/ours':>10}  ours reaches")

    def line(self, op: str, rows: int, ours: Callable, plain: Callable, flops: float, nbytes: float) -> None:
        our_time, torch_time = medians(self.seconds, ours, plain)
        shares = {"of sgemm": flops / our_time / self.flops, "of memory bandwidth": nbytes / our_time / self.bandwidth}
        best = max(shares, key=shares.__getitem__)
        line = f"{op:28} {rows:4} {our_time * 1e6:10.1f} {torch_time * 1e6:10.1f} {torch_time / our_time:10.2f}  {shares[best]:.0%} {best}"
        print(line, flush=True)


def bench_linear(report: Report, name: str, outputs: int, inputs: int, sizes: list[int]) -> None:
    copies = max(1, COLD // (outputs * inputs * 4))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    ready = cycle([(weight, pack(weight)) for weight in weights])
    plain, unpacked = cycle(weights), cycle(weights)

    def ours(x: torch.Tensor) -> torch.Tensor:
        weight, packed = next(ready)
        return linear(x, weight, None, packed)

    for rows in sizes:
        x = torch.randn(rows, inputs)
        work = 2 * rows * outputs * inputs, outputs * inputs * 4
        report.line(f"linear {name}", rows, lambda x=x: ours(x), lambda x=x: F.linear(x, next(plain)), *work)
        if rows >= 512:
            report.line(
                f"linear {name}, unpacked", rows, lambda x=x: linear(x, next(unpacked)), lambda x=x: F.linear(x, next(plain)), *work
            )


def bench_rowwise(report: Report, rows: int) -> None:
    gate, up, x, weight = torch.randn(rows, FFN), torch.randn(rows, FFN), torch.randn(rows, D), torch.randn(D)
    q, angle = torch.randn(rows, HEADS, HEAD_DIM), torch.randn(rows, HEAD_DIM // 2)
    cos, sin = angle.cos(), angle.sin()

    def plain_rope() -> torch.Tensor:
        first, second = q.chunk(2, -1)
        return torch.cat([first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]], -1)

    report.line("rmsnorm", rows, lambda: rmsnorm(x, weight, 1e-5), lambda: F.rms_norm(x, (D,), weight, 1e-5), 0, 8 * rows * D)
    report.line("rope", rows, lambda: rope(q, cos, sin), plain_rope, 0, 8 * rows * D)
    report.line("swiglu", rows, lambda: swiglu(gate, up), lambda: F.silu(gate) * up, 0, 12 * rows * FFN)


def bench_decode_attention(report: Report, sequences: int) -> None:
    blocks = -(-CONTEXT // PAGE)
    cache = allocate_cache(1, sequences * blocks, KV_HEADS, HEAD_DIM)
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
        8 * sequences * CONTEXT * KV_HEADS * HEAD_DIM,
    )


def bench_prefill_attention(report: Report, tokens: int) -> None:
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, scale = torch.tensor([0, tokens], dtype=torch.int32), HEAD_DIM**-0.5

    def plain() -> torch.Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)

    report.line("attention, prefill", tokens, lambda: packed_attention(q, k, v, starts, scale), plain, 2 * tokens**2 * D, 0)


def bench_sample(report: Report, rows: int) -> None:
    logits, ones, off = torch.randn(rows, VOCAB) * 2, torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    noise = torch.rand(rows, dtype=torch.float64)

    def plain() -> torch.Tensor:
        logp = logits.log_softmax(1)
        return logp.gather(1, torch.multinomial(logp.exp(), 1))

    for name, top_p, top_k in (("", 1.0, 0), (", top-p 0.9", 0.9, 0), (", top-k 50", 1.0, 50)):
        report.line(
            f"sample{name}", rows, lambda p=top_p, k=top_k: sample(logits, ones, ones * p, off + k, noise), plain, 0, 4 * logits.numel()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="time given to each pair (default 0.5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        report = Report(args.seconds)
        sizes = [1, 8, 32, 512]
        for name, outputs, inputs in (("q, o", D, D), ("k, v", KV_HEADS * HEAD_DIM, D), ("gate, up", FFN, D), ("down", D, FFN)):
            bench_linear(report, f"{name} {outputs}x{inputs}", outputs, inputs, sizes)
        bench_linear(report, f"head {VOCAB}x{D}", VOCAB, D, sizes[:3])
        for rows in sizes:
            bench_rowwise(report, rows)
        for rows in sizes[:3]:
            bench_decode_attention(report, rows)
        bench_prefill_attention(report, 128)
        bench_prefill_attention(report, 512)
        for rows in sizes[:3]:
            bench_sample(report, rows)


if __name__ == "__main__":
    main()
