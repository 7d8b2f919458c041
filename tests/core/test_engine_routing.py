"""The engine's routes: those of a forward from scratch, whatever happened on the way; and, once decided, decided for good.

    python -m pytest tests/core/test_engine_routing.py

`check` holds every answer of a run to the trainer's packed forward, for every version of the weights that was live in the run: log-probs,
and the rows of the tokens that were first computed under it.

Legend: T packed tokens, L MoE layers, K slots, E experts, M sampled tokens.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, random_model

from kernels.attention import PAGE
from miles_core import pack
from miles_core.engine.engine import Completion, Engine, Request, SamplingParams
from miles_core.model.layers import named_weights
from miles_core.model.moe import Route, live
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.routing import Replay, decode, to_ids
from miles_core.schema import Batch
from train import score

FAMILIES = ["qwen3-moe", "glm4-moe"]
Name = tuple[int, int]  # group, sample


def make_engine(model: Transformer, **changes: object) -> Engine:
    sizes = {"num_pages": 200, "max_batch_tokens": 1024, "max_sequences": 64, "routing_replay": "on"}
    return Engine(model, None, **{"seed": 11, **sizes, **changes})


def load(model: Transformer, weights: Transformer) -> None:
    with torch.no_grad():
        for (_, here), (_, there) in zip(named_weights(model), named_weights(weights), strict=True):
            here.copy_(there)


def versions_of(config: ModelConfig, count: int) -> list[Transformer]:
    """Weights of so many versions: far apart, so that they choose other experts."""
    return [random_model(config, seed) for seed in range(count)]


def request(group: int, sample: int, prompt: np.ndarray, max_new_tokens: int, temperature: float = 1.0) -> Request:
    return Request(group, sample, prompt.astype(np.int32), SamplingParams(temperature, 1.0, 0, max_new_tokens, ()))


def make_requests(max_new_tokens: int = 40) -> list[Request]:
    """Prompts around the page size, some with a common first page; three samples of each, the last one greedy."""
    random = np.random.default_rng(0)
    first_page = random.integers(0, 131, PAGE)
    prompts = [random.integers(0, 131, length) for length in (1, 20, 63, 65)]
    prompts += [np.append(first_page, random.integers(0, 131, length)) for length in (0, 6, 70)]
    return [
        request(group, sample, prompt, max_new_tokens - 5 * sample, 0.0 if sample == 2 else 1.0)
        for group, prompt in enumerate(prompts)
        for sample in range(3)
    ]


@dataclass
class Run:
    """`reached`: at each change of the weights, how many tokens of each sequence had their row."""

    engine: Engine
    done: dict[Name, Completion] = field(default_factory=dict)
    reached: list[dict[Name, int]] = field(default_factory=list)

    def step(self) -> None:
        for completion in self.engine.step():
            self.done[completion.trajectory.group, completion.trajectory.sample] = completion

    def change(self, weights: Transformer, mode: str) -> None:
        table, scheduler = self.engine.table, self.engine.scheduler
        names = {lane: (int(table.group[lane]), int(table.sample[lane])) for lane in scheduler.running}
        now = {name: int(table.reached[lane]) for lane, name in names.items()}
        now |= {(s.request.group, s.request.sample): s.reached for s in scheduler.waiting}
        self.reached.append(now)
        load(self.engine.model, weights)
        self.engine.set_version(self.engine.version + 1, mode)

    def finish(self) -> None:
        while self.engine.num_unfinished:
            self.step()


def run_through(engine: Engine, requests: list[Request], changes: dict[int, Transformer], mode: str = "recompute") -> Run:
    """All requests at once; at the steps named, other weights."""
    run = Run(engine)
    for each in requests:
        engine.add(each)
    for step in range(max(changes, default=0) + 1):
        if step in changes:
            run.change(changes[step], mode)
        run.step()
    run.finish()
    return run


def packed(run: Run) -> tuple[Batch, torch.Tensor]:
    """Every answer with its rows, and int64 [T], the version whose router decided the row of each token."""
    config = run.engine.model.config
    trajectories = [completion.trajectory for completion in run.done.values()]
    (batch,) = pack.pack(trajectories, 1 << 20)
    rows, decided = [], []
    for name in map(tuple, batch.ids_S3[:, :2].tolist()):
        completion = run.done[name]
        length = len(completion.trajectory.tokens)
        rows_TLK, recorded_T = decode(completion.routes, length, config.moe)
        assert recorded_T.tolist() == [True] * (length - 1) + [False], "only the last token was never computed"
        rows.append(rows_TLK)
        changes = [version for version, reached in enumerate(run.reached) if name in reached]  # that it was in flight at
        first = changes[0] if changes else completion.trajectory.oldest_version
        stops = [run.reached[version][name] for version in changes]
        decided.append(torch.from_numpy(first + np.searchsorted(stops, np.arange(length), side="right")))
    routed_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    routed_T[batch.cu_seqlens_S1[1:].long() - 1] = False
    return replace(batch, routes_TLK=torch.cat(rows), routed_T=routed_T), torch.cat(decided)


def chosen(model: Transformer, batch: Batch, route: Route) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's forward: log-probs, and the ids used [T, L, K]."""
    seen: list[torch.Tensor] = []

    def watching(layer: int, logits_TE: torch.Tensor, live_TK: torch.Tensor) -> torch.Tensor:
        seen.append(route(layer, logits_TE, live_TK))
        return seen[-1]

    with torch.no_grad():
        logp_M, _ = score(model, batch, watching)
    return logp_M, torch.stack(seen, 1)


def check(run: Run, versions: list[Transformer], *, replayed: bool) -> None:
    """Every change of the weights had all tokens in flight computed again: with the rows they had (`replayed`), or with live ones."""
    batch, decided_T = packed(run)
    ids_TLK = to_ids(batch.routes_TLK)
    for version, model in enumerate(versions):
        route = Replay(batch.routes_TLK, batch.routed_T) if replayed else live
        logp_M, _ = chosen(model, batch, route)
        mine_M = batch.version_M == version
        assert torch.equal(logp_M[mine_M], batch.logp_roll_M[mine_M]), f"log-probs of version {version}"
        _, now_TLK = chosen(model, batch, Replay(batch.routes_TLK, decided_T < version) if replayed else live)
        mine_T = (decided_T == version) & batch.routed_T
        assert torch.equal(now_TLK[mine_T], ids_TLK[mine_T]), f"rows of version {version}"
        if len(versions) > 1:
            assert (logp_M[~mine_M] != batch.logp_roll_M[~mine_M]).float().mean() > 0.5, "versions can be told apart"


WAYS = {
    "in company": {},
    "in chunks": {"max_batch_tokens": 7},
    "in larger chunks": {"max_batch_tokens": 33},
    "preempted": {"num_pages": 5, "max_batch_tokens": 64},
    "three at once": {"max_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "replay"), [("qwen3-moe", "on"), ("glm4-moe", "on"), ("qwen3-moe", "record")])
def test_rows_are_those_of_a_forward_from_scratch(name: str, replay: str, way: str) -> None:
    model = random_model(CONFIGS[name])
    engine = make_engine(model, **WAYS[way], routing_replay=replay)
    requests = make_requests(80 if way == "preempted" else 30)
    run = run_through(engine, requests, {})
    check(run, [model], replayed=replay == "on")
    assert (engine.counters.preemptions >= 3 and engine.counters.tokens_recomputed > 10) == (way == "preempted")
    again = run_through(engine, requests, {})  # now with the prompts in the tree, if there is room for them
    check(again, [model], replayed=replay == "on")
    for name, completion in again.done.items():
        assert torch.equal(run.done[name].routes, completion.routes)
        assert way == "preempted" or completion.trajectory.cached >= completion.trajectory.turns[0] - 1


def test_off_and_dense_record_nothing() -> None:
    for name, replay in (("qwen3-moe", "off"), ("qwen3", "on")):
        engine = make_engine(random_model(CONFIGS[name]), routing_replay=replay)
        assert engine.routes is None
        assert all(completion.routes is None for completion in engine.generate(make_requests(11)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "replay"), [("qwen3-moe", "on"), ("glm4-moe", "on"), ("glm4-moe", "record")])
def test_new_weights_never_change_a_row(name: str, replay: str, way: str) -> None:
    config = CONFIGS[name]
    versions = versions_of(config, 3)
    engine = make_engine(random_model(config), **WAYS[way], routing_replay=replay)
    run = run_through(engine, make_requests(), {14: versions[1], 27: versions[2]})
    check(run, versions, replayed=replay == "on")
    assert engine.counters.tokens_recomputed > 40
    assert way != "in company" or any(len(completion.trajectory.version) == 3 for completion in run.done.values())


def rows_in_flight(engine: Engine) -> dict[Name, torch.Tensor]:
    """Rows of every running sequence, from its pages."""
    found, table = {}, engine.table
    for lane in engine.scheduler.running:
        positions = np.arange(table.reached[lane])
        slots = torch.from_numpy(table.pages[lane, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)
        found[int(table.group[lane]), int(table.sample[lane])] = engine.routes.read(slots)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_were_decided_on_kept_keys_and_values_stay_too(name: str) -> None:
    """Version 1 goes on with the cache of version 0; version 2, the same weights, computes everything again from the rows."""
    config = CONFIGS[name]
    versions = versions_of(config, 2)
    engine = make_engine(random_model(config))
    run = Run(engine)
    for each in make_requests():
        engine.add(each)
    for step in range(30):
        if step == 10:
            old = rows_in_flight(engine)
            run.change(versions[1], "keep")
        run.step()
    kept = rows_in_flight(engine)
    assert len(kept) > 10 and all(torch.equal(kept[n][: len(old[n])], old[n]) and len(kept[n]) > len(old[n]) + 15 for n in kept)
    run.change(versions[1], "recompute")
    run.finish()
    batch, _ = packed(run)
    for name, rows_RLK in kept.items():
        found_TLK, _ = decode(run.done[name].routes, len(run.done[name].trajectory.tokens), config.moe)
        assert torch.equal(found_TLK[: len(rows_RLK)], rows_RLK)
    logp_M, _ = chosen(versions[1], batch, Replay(batch.routes_TLK, batch.routed_T))
    again_M, mixed_M = batch.version_M == 2, batch.version_M == 1
    assert again_M.sum() > 50 and torch.equal(logp_M[again_M], batch.logp_roll_M[again_M])
    assert (logp_M[mixed_M] != batch.logp_roll_M[mixed_M]).float().mean() > 0.5, "keys and values of the old weights must show"
    first_M = batch.version_M == 0
    logp_M, _ = chosen(versions[0], batch, Replay(batch.routes_TLK, batch.routed_T))
    assert torch.equal(logp_M[first_M], batch.logp_roll_M[first_M])


@pytest.mark.parametrize("replay", ["on", "record"])
@pytest.mark.parametrize("length", [20, PAGE, 150])
def test_equal_prompts_with_other_rows_share_nothing(length: int, replay: str) -> None:
    """One is computed again with the rows of the old weights, one is new: under "on" their keys and values differ."""
    config = CONFIGS["qwen3-moe"]
    versions = versions_of(config, 2)
    engine = make_engine(random_model(config), routing_replay=replay)
    prompt = np.random.default_rng(1).integers(0, 131, length)
    run = Run(engine)
    for sample in range(2):
        engine.add(request(0, sample, prompt, 30))
    for _ in range(5):
        run.step()
    run.change(versions[1], "recompute")
    for sample in range(2):
        engine.add(request(1, sample, prompt, 30))
    for _ in range(5):
        run.step()
    engine.add(request(2, 0, prompt, 30))  # comes when both stand in the tree
    run.finish()
    check(run, versions, replayed=replay == "on")
    cached = {name: completion.trajectory.cached for name, completion in run.done.items()}
    assert cached[0, 0] == 0 and cached[0, 1] == length and cached[1, 1] == length and cached[2, 0] >= length - 1
    assert replay == "record" or cached[1, 0] == 0
    old, new, last = (decode(run.done[n].routes, length + 30, config.moe)[0][:length] for n in ((0, 0), (1, 0), (2, 0)))
    assert torch.equal(new, last) and (old != new).flatten(1).any(1).float().mean() > 0.5
    # Samples 0 and 1 of group 0 have the same old rows, so the prompt is computed again once, and its tail's answers twice.
    assert engine.counters.tokens_recomputed <= length + 2 * 5


def test_rows_decided_on_mixed_keys_and_values_are_like_nobody_elses() -> None:
    """Two requests with the same noise and nearly even odds get the same tokens, one on a mixed cache and one not: rows differ.

    When both are computed again, the pages of the first must not be taken for those of the second.
    """
    config = CONFIGS["qwen3-moe"]
    versions = versions_of(config, 3)
    for model in versions:
        model.lm_head.weight.data.mul_(1e-3)
    model = random_model(config)
    load(model, versions[0])
    run = Run(make_engine(model, max_batch_tokens=PAGE))
    twins = [request(1, 0, np.arange(20), 250) for _ in range(2)]
    for each in twins:
        run.engine.add(each)
    for _ in range(100):
        run.step()
    run.change(versions[1], "recompute")
    run.step()
    assert len(run.engine.scheduler.running) == 1, "the second waits for the prompt, and will find other weights"
    run.change(versions[2], "keep")
    for _ in range(80):
        run.step()
    run.change(versions[2], "recompute")
    done = []
    while run.engine.num_unfinished:
        done += run.engine.step()
    for number, completion in enumerate(done):
        completion.trajectory.sample = number
        run.done[1, number] = completion
    batch, _ = packed(run)
    rows = [decode(completion.routes, 270, config.moe)[0] for completion in done]
    assert torch.equal(*batch.tokens_T.view(2, -1)) and not torch.equal(rows[0][:190], rows[1][:190])
    logp_M, _ = chosen(versions[2], batch, Replay(batch.routes_TLK, batch.routed_T))
    last_M = batch.version_M == 3
    assert last_M.sum() > 50 and torch.equal(logp_M[last_M], batch.logp_roll_M[last_M])


def random_requests(random: np.random.Generator, count: int) -> list[Request]:
    """Groups of one to four; prompts that often begin alike; one in three greedy."""
    stems = [random.integers(0, 131, length) for length in (10, PAGE, 100)]
    requests: list[Request] = []
    while len(requests) < count:
        group, stem = len(requests), stems[random.integers(3)] if random.random() < 0.6 else np.empty(0, np.int64)
        prompt = np.append(stem, random.integers(0, 131, random.integers(1, 60)))
        for sample in range(random.integers(1, 5)):
            requests.append(request(group, sample, prompt, int(random.integers(1, 180)), float(random.random() < 0.67)))
    return requests


@pytest.mark.parametrize("replay", ["on", "record"])
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_tokens_in_random_company(seed: int, replay: str) -> None:
    """Random arrivals, few pages, four versions of the weights at random moments."""
    random = np.random.default_rng(seed)
    config = CONFIGS[FAMILIES[seed % 2]]
    versions = versions_of(config, 4)
    engine = make_engine(
        random_model(config), num_pages=9, max_batch_tokens=int(random.integers(20, 120)), max_sequences=12, routing_replay=replay
    )
    run, pending = Run(engine), random_requests(random, 60)
    while pending or engine.num_unfinished:
        for _ in range(random.integers(0, 3)):
            if pending:
                engine.add(pending.pop(0))
        run.step()
        if engine.version + 1 < len(versions) and len(run.done) > 14 * (engine.version + 1):
            run.change(versions[engine.version + 1], "recompute")
    check(run, versions, replayed=replay == "on")
    counters = engine.counters
    assert engine.version == 3 and len(run.done) >= 60 and counters.tokens_sampled > 2000
    assert counters.preemptions >= 3 and counters.prompt_tokens_cached > 1000 and counters.tokens_recomputed > 400
