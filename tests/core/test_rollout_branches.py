"""Agents that fork their conversation, from the rollout rank through a real slot of the ring to the trainer's log-probs.

    python -m pytest tests/core/test_rollout_branches.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from kernels.dispatch import use_fast
from miles_core import pack
from miles_core.advantage import ADVANTAGES
from miles_core.config import Config
from miles_core.earlier import Earlier
from miles_core.journal import Journal, files
from miles_core.journal_file import load, scan
from miles_core.metrics import merge
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.parity import Gate
from miles_core.report import rollout_metrics
from miles_core.ring import Ring
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes
from miles_core.schema import VERDICTS, Trajectory, group_nbytes
from miles_core.topology import Layout
from miles_core.weights import Board, Plan, Publisher, Receiver
from rollout import Inputs, Rollout, load_inputs, recipe_of

CPU, LAYOUT = torch.device("cpu"), Layout(1, 1, 0)
# Two turns; then the context is compacted, and the agent goes on from a summary; then back to the first turn, with another question. One
# sample in three never forks, and one has an agent that breaks at the end.
AGENTS = """
async def run(session, prompt, metadata):
    group, sample = str(session.group), str(session.sample)
    first = await session.chat(prompt)
    history = [*prompt, first.message]
    second = await session.chat([*history, {"role": "user", "content": "539214="}])
    if sample == "0":
        return {"reward": 1.0}
    third = await session.chat([{"role": "user", "content": "97" + sample + "="}])
    await session.chat([*history, {"role": "user", "content": "318807="}])
    if sample == "3":
        raise RuntimeError("a tool is gone")
    return {"reward": float(len(third.message["content"])) + int(sample)}


async def drifting(session, prompt, metadata):
    await session.chat(prompt)
    session._session.tree.nodes[1].prompt[:] = 5
    return {"reward": 1.0}
"""


@pytest.fixture(autouse=True)
def invariant_kernels_again() -> Iterator[None]:
    yield
    use_fast(False)  # a run without parity has chosen others


def configured(tmp_path: Path, agent: str = "run", **changes: object) -> tuple[Config, Inputs]:
    (tmp_path / "forks.py").write_text(AGENTS)
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_turns": 4, "max_new_tokens": 200, "steps": 1, "max_staleness": 0}
    config = Config(**{"agent": f"{tmp_path}/forks.py:{agent}", "device": "cpu", "rollout_ranks_per_node": 0, **sizes, **changes})
    return config, load_inputs(config, CPU, torch.float32)


@contextlib.contextmanager
def rolled_out(config: Config, inputs: Inputs) -> Iterator[tuple[list[list[Trajectory]], RouteStore, Ring]]:
    """The groups of one step, as views of their slots, and the routes that the rank has kept."""
    ring = Ring.create(**train.ring_shape(config, LAYOUT, inputs), num_rollout_ranks=1)
    board = Board.create(Plan.of(hf.build(inputs.model_config, "meta"), torch.float32), [0], "shm")
    Publisher(board, 10.0).publish(0, named_weights(hf.load(inputs.model_dir)))
    store, model = RouteStore(0, None), hf.build(inputs.model_config, CPU, torch.float32)
    directory = Path(config.agent).parent / "journal"
    journal = Journal(directory, 1, 0, recipe_of(config, model))
    earlier = Earlier(directory, 1, {}, lambda *_: True, lambda _: 0, 0)
    with contextlib.closing(Rollout(config, inputs, model, ring, Receiver(board, 0, 10.0), 0, store, None, journal, earlier)) as rollout:
        rollout.refresh(min_version=0)
        for _ in range(100_000):
            if ring.ready(config.prompts_per_step):
                break
            rollout.tick()
        groups = [ring.read(ref) for ref in ring.take(config.prompts_per_step, 1.0)]
        entries = sorted((entry for path in files(directory) for entry in scan(path).entries), key=lambda entry: entry.group)
        assert [e.group for e in entries] == [g[0].group for g in groups], "every group is in the journal before the ring, whole"
        for entry, group in zip(entries, groups, strict=True):
            same, routes = load(entry)
            assert [t.key for t in same] == [t.key for t in group] and all(
                np.array_equal(a.logp_roll, b.logp_roll) for a, b in zip(same, group, strict=True)
            )
            assert all(np.array_equal(r, store.rows[t.key].numpy()) for t, r in zip(group, routes, strict=True))
        yield groups, store, ring


def difference(trajectories: list[Trajectory], store: RouteStore, inputs: Inputs) -> tuple[float, float]:
    """(tokens compared with the trainer, largest difference), with every trajectory's own rows replayed, in small micro-batches."""
    model, moe, gate, seen = hf.load(inputs.model_dir), inputs.model_config.moe, Gate("report", "recompute", synchronous=True), []
    fetch = Fetch(trajectories, store, None, moe, CPU, 1.0)
    for batch in map(fetch.attach, pack.pack(trajectories, inputs.max_context)):
        route = TrainRoutes(batch, moe, replay=True, passes=1, balance=BalanceParams())
        with torch.no_grad():
            logp_M, _ = train.score(model, batch, route)
        seen.append(gate.watch(logp_M, batch, 0, route))
        assert route.first_difference() is None
    found = merge(seen)
    return found["train/logp_diff_tokens"].value(), found["train/logp_diff_max"].value()


@pytest.mark.parametrize("max_branches", [4, 2])
def test_every_branch_is_trained_on_what_was_sampled(tmp_path: Path, max_branches: int) -> None:
    config, inputs = configured(tmp_path, max_branches=max_branches)
    with rolled_out(config, inputs) as (groups, store, ring):
        trajectories = [t for group in groups for t in group]
        branches = [1, *[min(3, max_branches)] * 3]
        for group in groups:
            assert [t.key[1:] for t in group] == [(sample, sibling) for sample in range(4) for sibling in range(branches[sample])]
            assert group_nbytes(group) <= ring.slot_bytes
            episodes = [[t for t in group if t.sample == sample] for sample in range(4)]
            rewards, verdicts = (np.array([getattr(e[0], name) for e in episodes]) for name in ("reward", "verdict"))
            assert verdicts.tolist() == [0, 0, 0, VERDICTS.index("infra_error")] and len(set(rewards.tolist())) > 2
            advantages = ADVANTAGES[config.advantage](rewards, verdicts == 0)
            for siblings, advantage in zip(episodes, advantages, strict=True):
                assert {(t.reward, t.verdict, t.advantage) for t in siblings} == {(siblings[0].reward, siblings[0].verdict, advantage)}
                assert sum(t.num_trained for t in siblings) == siblings[0].episode_tokens
        assert len(store.rows) == len(trajectories) and len({t.route_digest for t in trajectories}) == len(trajectories)
        metrics = {name: metric.value() for name, metric in rollout_metrics(groups).items()}
        assert metrics["rollout/branches_dropped"] == 2 * 3 * (3 - branches[1]) and metrics["rollout/verdict/ok"] == 3 / 4
        assert metrics["rollout/tokens"] == sum(t.num_trained for t in trajectories)
        assert "rollout/pass@4" in metrics and metrics["rollout/drift/special_count"] == metrics["rollout/drift/other_text"] == 0
        assert metrics["rollout/prefix_hit_rate_later"] > 0.5
        counts = pack.count(trajectories)
        assert (counts.loss_episodes, counts.sequences) == (2 * 3, 2 * sum(branches))
        compared, largest = difference(trajectories, store, inputs)
        assert (compared, largest) == (counts.loss_tokens, 0.0) and not store.rows


@pytest.mark.parametrize("parity", ["strict", "report", "off"])
def test_hard_drift_stops_a_strict_run_and_is_counted_by_others(tmp_path: Path, parity: str) -> None:
    config, inputs = configured(tmp_path, "drifting", parity=parity, samples_per_prompt=2)
    if parity == "strict":
        with pytest.raises(RuntimeError, match="group 0 sample 0: the tokens of the session drifted from their messages: Drift"):
            with rolled_out(config, inputs):
                pass
        return
    with rolled_out(config, inputs) as (groups, _, _):
        metrics = {name: metric.value() for name, metric in rollout_metrics(groups).items()}
        assert metrics["rollout/drift/special_count"] == 1.0 and metrics["rollout/drift/other_text"] == 0.0


def test_what_a_run_makes_room_for(tmp_path: Path) -> None:
    """Branches, where an agent plays: no more than there are turns. The slots of the ring follow."""
    plain, one = configured(tmp_path)[0], Config(device="cpu", rollout_ranks_per_node=0, max_turns=4, max_staleness=0)
    for changes, branches in (({}, 4), ({"max_branches": 3}, 3), ({"max_turns": 2}, 2)):
        assert configured(tmp_path, **changes)[1].max_branches == branches
    no_agent, many = load_inputs(one, CPU, torch.float32), load_inputs(plain, CPU, torch.float32)
    assert (no_agent.max_turns, no_agent.max_branches) == (1, 1)
    assert "in each of at most 4 branches" in train.describe(plain, LAYOUT, many)
    nbytes = [train.ring_shape(config, LAYOUT, inputs)["slot_bytes"] for config, inputs in ((one, no_agent), (plain, many))]
    assert nbytes[1] / plain.samples_per_prompt == pytest.approx(4 * nbytes[0] / one.samples_per_prompt, rel=0.02)
    assert "branches" not in train.describe(one, LAYOUT, no_agent)
