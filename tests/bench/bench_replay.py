"""What routing replay costs, and what it is for. Not a test.

    python tests/bench/bench_replay.py bytes                     bytes of a long trajectory's rows
    python tests/bench/bench_replay.py cost [--model DIR]        recording per decode step, replay per training step
    python tests/bench/bench_replay.py runs --seeds 0 1 2        learning with and without replay, the trainer on non-invariant ops

`cost` compares in one process, in turns, and prints medians: decode of a full batch with and without recording; forward and backward of one
step's samples with rows replayed and routed live. `runs` trains the embedded policy, with train.py as it is except that the training rank
computes with the fast ops of `--parity off` while the gate still measures, as `--parity report` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from kernels import dispatch
from miles_core import guard, numerics, pack
from miles_core.assets import TINY
from miles_core.engine.engine import Completion, Engine, Request, SamplingParams
from miles_core.model import hf
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import Transformer
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes, encode, id_dtype

ROOT = Path(__file__).resolve().parents[2]


def print_bytes() -> None:
    """32,768 tokens, 60 MoE layers, top-8."""
    num_tokens, layers, top_k = 32768, 60, 8
    for num_experts in (256, 257):
        moe = MoEConfig(num_experts, top_k, 1, tuple(range(layers)))
        rows = torch.zeros(num_tokens, layers, top_k, dtype=id_dtype(moe.num_experts))
        payload = encode(rows, np.ones(num_tokens, bool))
        int32 = num_tokens * layers * top_k * 4
        print(f"{num_experts} experts: {len(payload) / 1e6:.1f} MB carried ({payload.dtype}, mask included); as int32 {int32 / 1e6:.1f} MB")


def requests(model: Transformer, count: int, new_tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(1.0, 1.0, 0, new_tokens, ())
    vocabulary = model.config.vocab_size
    return [Request(i // 8, i % 8, rng.integers(0, vocabulary, 12).astype(np.int32), params) for i in range(count)]


def decode_steps(model: Transformer, batch: int, new_tokens: int, replay: str) -> tuple[list[float], list[Completion]]:
    """Seconds of every pure decode step of a full batch, and the answers."""
    engine = Engine(
        model, None, seed=0, num_pages=2 * batch, max_batch_tokens=64 * batch, max_sequences=batch, routing_replay=replay
    )  # fmt: skip
    for request in requests(model, batch, new_tokens):
        engine.add(request)
    seconds, done = [], []
    while engine.num_unfinished:
        start = time.perf_counter()
        done += engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[1:-1], sorted(done, key=lambda c: c.number)


def training_step(model: Transformer, batch: object, replay: bool) -> float:
    import train

    start = time.perf_counter()
    route = TrainRoutes(batch, model.config.moe, replay=replay, passes=1, balance=BalanceParams())
    logp_M, _ = train.score(model, batch, route)
    (logp_M.sum() + route.loss).backward()
    route.check()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def in_turns(first: Callable[[], list[float]], second: Callable[[], list[float]], turns: int) -> tuple[float, float]:
    """Median seconds of both; the ratio of what is called in turns is less noisy than either."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].extend((first, second)[which]())
    return statistics.median(times[0]), statistics.median(times[1])


def print_cost(model_dir: Path, batches: list[int], turns: int) -> None:
    numerics.setup()
    model = hf.load(model_dir)
    for batch in batches:
        plain, recorded = in_turns(
            lambda b=batch: decode_steps(model, b, 40, "off")[0], lambda b=batch: decode_steps(model, b, 40, "on")[0], turns
        )  # fmt: skip
        print(f"decode, batch {batch:3d}: {1e3 * plain:7.3f} ms a step, recorded {1e3 * recorded:7.3f} ms: {recorded / plain - 1:+.1%}")
    store = RouteStore(0, None)
    _, done = decode_steps(model, max(batches), 24, "on")
    for completion in done:
        store.keep(completion.trajectory, completion.routes)
    trajectories = [completion.trajectory for completion in done]
    (batch,) = pack.pack(trajectories, 1 << 20)
    batch = Fetch(trajectories, store, None, model.config.moe, torch.device("cpu"), 1.0).attach(batch)
    for p in model.parameters():
        p.requires_grad_(True)
    live, replayed = in_turns(lambda: [training_step(model, batch, False)], lambda: [training_step(model, batch, True)], 4 * turns)
    print(f"training, {batch.num_tokens} tokens: {1e3 * live:7.1f} ms live, replayed {1e3 * replayed:7.1f} ms: {replayed / live - 1:+.1%}")


def train_fast() -> None:
    """train.py, whose training ranks use the fast ops; for `runs`."""
    import train

    prepare = train.Trainer.__init__

    def init(self: train.Trainer, *args: object, **kwargs: object) -> None:
        prepare(self, *args, **kwargs)
        dispatch.use_fast(True)

    train.Trainer.__init__ = init
    guard.run(train.main)


def mean(lines: list[dict], name: str) -> float:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.fmean(values) if values else float("nan")


def print_runs(seeds: list[int], steps: int, staleness: int, flags: list[str]) -> None:
    print("replay  seed  route_diff  |logp diff| fresh / 1 old     ratio_max  reward, last 10  pass@1 held out")
    for replay in ("on", "record"):
        for seed in seeds:
            with tempfile.TemporaryDirectory() as run_dir:
                command = [
                    sys.executable, str(ROOT / "launch/torchrun.py"), "--standalone", "--nproc-per-node", "2", __file__, "train",
                    "--parity", "report", "--routing-replay", replay, "--seed", seed, "--steps", steps, "--max-staleness", staleness,
                    "--run-dir", run_dir, "--save-every", 0, *flags,
                ]  # fmt: skip
                subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
                lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
            trained = [line for line in lines if "train/loss" in line]
            fresh, stale = mean(trained, "train/logp_diff_mean"), mean(trained, "train/logp_diff_mean_stale1")
            rerouted = mean(trained, "train/route_diff_frac")
            print(
                f"{'on' if replay == 'on' else 'off':6s}  {seed:4d}  {rerouted:10.3%}  {fresh:12.2e} / {stale:.2e}"
                f"  {max(line['train/ratio_max'] for line in trained):16.2f}  {mean(trained[-10:], 'rollout/reward_mean'):15.3f}"
                f"  {lines[-1]['eval/sort/pass@1']:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bytes")
    cost = commands.add_parser("cost")
    cost.add_argument("--model", type=Path, default=TINY)
    cost.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    cost.add_argument("--turns", type=int, default=8)
    runs = commands.add_parser("runs")
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--steps", type=int, default=150)
    runs.add_argument("--staleness", type=int, default=1)
    args, flags = parser.parse_known_args()
    if args.command == "bytes":
        print_bytes()
    elif args.command == "cost":
        print_cost(args.model, args.batches, args.turns)
    else:
        print_runs(args.seeds, args.steps, args.staleness, flags)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
        train_fast()
    else:
        main()
