"""Sessions under load: what must be 0, what the prefix cache is worth, and what a turn costs besides the model. Not a test.

    python tests/bench/bench_sessions.py [--model DIR] [--sessions 64] [--turns 20] [--update-every 40]

Clients as agents are (tito_traffic.agents): a long first prompt whose beginning they share, answers of up to 40 tokens, short tool
messages; at random they ask again, go back and go away.

1. One session alone, then all at once: with room for everything; for the longest conversation of each; and for half of that.
2. All at once, while new weights arrive every so many steps of the engine, with `keep` and with `recompute`.
3. One long session of answers of one token: time of this thread without the model's, at turn 5 and at turn 100, and how its state grows.

Hit rates are cached / all tokens of prompts. `new` is the share that no cache can have, because the turn brings it; `excess` is what a turn
computed beyond its new tokens: at most 1 (the last sampled token, whose keys were never needed) is as good as it gets. "Of whole turns"
leaves out turns that begin under other weights than the turn before ended with, or that saw new ones.

Exits with 1 if a number that must be 0 is not, or if nothing was compared with the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/core")]

from tito_traffic import (  # noqa: E402  # the path comes first
    Client,
    Ear,
    Hits,
    Turn,
    agents,
    change,
    differing,
    drive,
    later,
    mask_errors,
    new_weights,
    play,
    prefix_violations,
)

from kernels.attention import PAGE  # noqa: E402
from miles_core.assets import TINY  # noqa: E402
from miles_core.engine.engine import Engine, SamplingParams  # noqa: E402
from miles_core.model import hf  # noqa: E402
from miles_core.tito.engine_backend import EngineBackend  # noqa: E402
from miles_core.tito.render import Renderer  # noqa: E402
from miles_core.tito.samples import Sample, collect  # noqa: E402
from miles_core.tito.session import Session  # noqa: E402
from miles_core.tito.verify import renderer_for  # noqa: E402

CONTEXT = 3000  # more than 20 turns need


class Bench:
    def __init__(self, model_dir: Path, turns: int, update_every: int) -> None:
        self.model_dir, self.turns, self.update_every = model_dir, turns, update_every
        self.tokenizer = hf.load_tokenizer(model_dir)
        self.renderer: Renderer = renderer_for(self.tokenizer)
        self.vocabulary = hf.load(model_dir).config.vocab_size
        self.traffic = agents(hf.load_stop_ids(model_dir), self.vocabulary)
        self.failed = False

    def engine(self, num_pages: int) -> Engine:
        return Engine(
            hf.load(self.model_dir), self.tokenizer,
            seed=0, num_pages=num_pages, max_batch_tokens=1024, max_sequences=64, routing_replay="on",
        )  # fmt: skip

    def session(self, backend: EngineBackend, number: int = 0) -> Session:
        return Session(str(number), self.renderer, Ear(backend), group=number, sample=0, max_context=CONTEXT)

    def must_be_0(self, name: str, count: int, of: str = "") -> None:
        self.failed |= count != 0
        print(f"  {name:<44} {count}{of}{'' if count == 0 else '   MUST BE 0'}", flush=True)

    def load(self, title: str, num_sessions: int, num_pages: int, on_update: str | None = None) -> int:
        """Run clients and print. Returns how many pages hold the longest conversation of each of them."""
        engine = self.engine(num_pages)
        backend = EngineBackend(engine)
        clients = [Client(self.session(backend, i), i, self.traffic) for i in range(num_sessions)]

        def before_step(step: int) -> None:
            if on_update and step % self.update_every == self.update_every - 1:
                change(engine, on_update)

        start = time.perf_counter()
        play(engine, backend, clients, self.turns, before_step)
        seconds = time.perf_counter() - start
        turns, cancelled = [turn for client in clients for turn in client.turns], sum(client.cancelled for client in clients)
        deepest, longest = max(turn.node.depth for turn in turns), max(len(turn.request.tokens) for turn in turns)
        print(
            f"{title}: {len(turns)} turns, up to {deepest} of one branch, {cancelled} more cancelled, prompts of up to {longest} tokens, "
            f"{num_pages} pages of {PAGE}, {seconds:.0f} s"
        )
        self._check(clients, engine.version, on_update or "recompute")
        self._print_hits("hit rate with first turns", turns)
        self._print_hits("hit rate beyond first turns", later(clients))
        if on_update:
            self._print_hits("... of whole turns", [turn for turn in later(clients) if whole(turn)])
        counters = engine.counters
        print(f"  preemptions {counters.preemptions}, recomputed tokens {counters.tokens_recomputed}, versions {engine.version + 1}")
        return room(clients)

    def _check(self, clients: list[Client], version: int, on_update: str) -> None:
        samples = []
        self.must_be_0("prefix violations", sum(map(prefix_violations, clients)))
        wrong = 0
        for client in clients:
            mine = collect(client.session)
            wrong += mask_errors(client, mine)
            samples += mine
        self.must_be_0("hard drift", sum(sample.drift.hard for sample in samples))
        self.must_be_0("ids, masks, log-probs unlike the recount", wrong)
        compared, differ = self._compare(samples, version, on_update)
        self.must_be_0("log-probs unlike the trainer's", differ, f" of {compared}")
        # With "keep", cached keys of several versions are mixed: only conversations of one version compare, and there may be none.
        self.failed |= compared == 0 and on_update != "keep"

    def _compare(self, samples: list[Sample], last: int, on_update: str) -> tuple[int, int]:
        """Each sample under the newest weights that it has tokens of."""
        model, counts = hf.load(self.model_dir), np.zeros(2, np.int64)
        for version in range(last + 1):
            if version:
                new_weights(model)
            if mine := [sample for sample in samples if sample.trajectory.version[:, 0].max() == version]:
                counts += differing(model, mine, version, on_update)
        return tuple(counts.tolist())

    def _print_hits(self, name: str, turns: list[Turn]) -> None:
        if turns:
            hits = Hits.of(turns)
            print(f"  {name:<44} {hits.rate:.4f}   new {hits.new / hits.tokens:.4f}, excess at most {hits.excess}", flush=True)


def room(clients: list[Client]) -> int:
    pages = set()
    for client in clients:
        turn = max(client.turns, key=lambda turn: turn.node.num_tokens)
        tokens = np.concatenate((turn.request.tokens, turn.result.tokens))
        pages |= {tokens[: end + PAGE].tobytes() for end in range(0, len(tokens), PAGE)}
    return len(pages)


def whole(turn: Turn) -> bool:
    """Whether the turn and the one before were sampled from one version."""
    assert turn.node.parent is not None
    return len({*turn.result.version.tolist(), *turn.node.parent.version.tolist()}) == 1


# ---- a long session


def long_session(bench: Bench, turns: int) -> tuple[list[float], list[float], list[float], dict[int, tuple[int, int]]]:
    """Seconds of this thread at each turn: in the session, in the engine, in the model; and bytes of state after some turns."""
    engine = bench.engine(2 * -(-CONTEXT // PAGE))
    spent = {"model": 0.0, "engine": 0.0}
    engine.model.forward = timed(engine.model.forward, spent, "model")
    engine.step = timed(engine.step, spent, "engine")
    session = bench.session(backend := EngineBackend(engine))
    params = SamplingParams(1.0, 1.0, 0, 2, tuple(range(bench.vocabulary)))
    seconds, state = ([], [], []), {}

    async def main() -> None:
        messages = [*bench.traffic.beginning(), {"role": "user", "content": "1+1"}]
        for turn in range(1, turns + 1):
            before, start = dict(spent), time.thread_time()
            task = asyncio.ensure_future(session.chat(messages, params=params))
            await drive(engine, backend, task)
            reply = await task
            total, model, engine_ = (time.thread_time() - start, *(spent[name] - before[name] for name in ("model", "engine")))
            for column, value in zip(seconds, (total - engine_, engine_ - model, model), strict=True):
                column.append(value)
            messages = [*messages, reply.message, {"role": "tool", "content": "2"}]
            if turn in (5, 25, 50, 100):
                state[turn] = size_of([session.tree.nodes, session.tree._paths], set()), session.tree.num_tokens

    asyncio.run(main())
    return *seconds, state


def timed(function: Any, spent: dict[str, float], name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = function(*args, **kwargs)
        spent[name] += time.thread_time() - start
        return result

    return call


def size_of(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and of all that it leads to, each once."""
    if id(thing) in seen or thing is None or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, np.ndarray):
        return size + (size_of(thing.base, seen) if thing.base is not None else 0)
    if isinstance(thing, torch.Tensor):
        return size + thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return size + sum(size_of(item, seen) for pair in thing.items() for item in pair)
    if isinstance(thing, list | tuple | set):
        return size + sum(size_of(item, seen) for item in thing)
    if is_dataclass(thing):
        return size + sum(size_of(getattr(thing, field.name), seen) for field in fields(thing))
    return size + (size_of(vars(thing), seen) if hasattr(thing, "__dict__") else 0)


def print_long(bench: Bench) -> None:
    runs = [long_session(bench, 104) for _ in range(3)]
    for name, column in (("session", 0), ("engine without the model", 1)):
        at = {turn: statistics.median(t for run in runs for t in run[column][turn - 4 : turn + 3]) for turn in (5, 100)}
        print(f"  {name:<44} turn 5 {1e3 * at[5]:.2f} ms, turn 100 {1e3 * at[100]:.2f} ms: x {at[100] / at[5]:.2f}")
    state = runs[-1][3]
    grown = [f"turns {a} to {b} {(state[b][0] - state[a][0]) / (state[b][1] - state[a][1]):.0f}" for a, b in pairwise(state)]
    print("  bytes of state for each token added".ljust(46), ", ".join(grown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--update-every", type=int, default=40, help="steps of the engine")
    args = parser.parse_args()
    bench = Bench(args.model, args.turns, args.update_every)
    roomy = args.sessions * -(-2 * CONTEXT // PAGE)
    bench.load("one session", 1, roomy)
    pages, least = bench.load(f"{args.sessions} sessions", args.sessions, roomy), -(-CONTEXT // PAGE)
    bench.load(f"{args.sessions} sessions, as many pages as their longest conversations fill", args.sessions, max(pages, least))
    bench.load(f"{args.sessions} sessions, half as many (but room for one)", args.sessions, max(pages // 2, least))
    for on_update in ("keep", "recompute"):
        bench.load(f"{args.sessions} sessions, new weights every {args.update_every} steps, {on_update}", args.sessions, roomy, on_update)
    print("one long session, time of the thread (medians of 21)")
    print_long(bench)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
