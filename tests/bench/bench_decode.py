"""Generated tokens/s of our engine against transformers' generate: same weights, float32, one thread, one process, alternating runs.

    OMP_NUM_THREADS=1 python tests/bench/bench_decode.py models/smollm2-135m
    OMP_NUM_THREADS=1 python tests/bench/bench_decode.py MODEL_DIR --batch 1 8 32 --rounds 5 --temperature 1

A run is `--batch` different prompts of `--prompt` random tokens, each answered by exactly `--new` tokens, prefill included. Prints one
line per batch size: tokens/s of either (median over rounds), their ratio (median of the rounds' ratios), and the ratio wanted. A second
ratio takes off the time of a run that makes one token, so that it compares decode alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["USE_HUB_KERNELS"] = "0"  # transformers would take our folder for its hub kernels

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf

TARGETS = {1: 2.0, 8: 1.8, 32: 1.5}


def time_ours(model, prompts: np.ndarray, num_new: int, temperature: float) -> float:
    """Seconds. The engine is made anew, so that no run finds the pages of the one before."""
    batch, length = prompts.shape
    num_pages = batch * (-(-(length + num_new) // 64) + 1)
    engine = Engine(model, None, seed=0, num_pages=num_pages, max_batch_tokens=2048, max_sequences=batch)
    requests = [Request(i, 0, prompt, SamplingParams(temperature, 1.0, 0, num_new, ())) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - start
    assert all(len(c.trajectory.tokens) == length + num_new for c in done)
    return seconds


@torch.inference_mode()
def time_theirs(model, prompts: np.ndarray, num_new: int, temperature: float) -> float:
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    tokens = torch.from_numpy(prompts.astype(np.int64))
    start = time.perf_counter()
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=num_new, max_new_tokens=num_new, pad_token_id=0, **how
    )
    seconds = time.perf_counter() - start
    assert out.shape == (len(prompts), prompts.shape[1] + num_new)
    return seconds


def bench(ours, theirs, batch: int, args: argparse.Namespace) -> None:
    vocabulary = ours.config.vocab_size
    prompts = np.random.default_rng(batch).integers(0, vocabulary, (batch, args.prompt)).astype(np.int32)
    seconds: dict[str, list[float]] = {"ours": [], "ours_1": [], "theirs": [], "theirs_1": []}
    for _ in range(args.rounds):
        seconds["theirs_1"].append(time_theirs(theirs, prompts, 1, args.temperature))
        seconds["ours_1"].append(time_ours(ours, prompts, 1, args.temperature))
        seconds["theirs"].append(time_theirs(theirs, prompts, args.new, args.temperature))
        seconds["ours"].append(time_ours(ours, prompts, args.new, args.temperature))
    mine, others, mine_1, others_1 = (seconds[name] for name in ("ours", "theirs", "ours_1", "theirs_1"))
    ratio = median(b / a for a, b in zip(mine, others, strict=True))
    decode = median((b - d) / (a - c) for a, b, c, d in zip(mine, others, mine_1, others_1, strict=True))
    tokens = batch * args.new
    print(
        f"batch {batch:3d}: ours {tokens / median(mine):7.1f} tok/s, transformers {tokens / median(others):7.1f} tok/s, ratio {ratio:.2f} "
        f"(wanted {TARGETS.get(batch, '-')}), decode alone {decode:.2f}; prefill {batch * args.prompt / median(mine_1):.0f} "
        f"against {batch * args.prompt / median(others_1):.0f} tok/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory in Hugging Face layout")
    parser.add_argument("--batch", type=int, nargs="+", default=list(TARGETS), help="batch sizes")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, alternating")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    ours = hf.load(args.model)
    theirs = AutoModelForCausalLM.from_pretrained(str(args.model), dtype=torch.float32).eval()
    print(f"{args.model}: {args.prompt} prompt + {args.new} new tokens, float32, {torch.get_num_threads()} thread, median of {args.rounds}")
    for batch in args.batch:
        bench(ours, theirs, batch, args)


if __name__ == "__main__":
    main()
