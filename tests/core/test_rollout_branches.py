"""Agents that fork their conversation, from the rollout rank through a real slot of the ring to the trainer's log-probs.

    python -m pytest tests/core/test_rollout_branches.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_kit import CPU, LAYOUT, rolled_out

import train
from kernels.dispatch import use_fast
from miles_core import pack
from miles_core.advantage import ADVANTAGES
from miles_core.config import Config
from miles_core.metrics import merge
from miles_core.model import hf
from miles_core.parity import Gate
from miles_core.report import rollout_metrics
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes
from miles_core.schema import VERDICTS, Trajectory, group_nbytes
from rollout import Inputs, load_inputs

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
    with rolled_out(config, inputs, tmp_path) as (groups, store, ring):
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
            with rolled_out(config, inputs, tmp_path):
                pass
        return
    with rolled_out(config, inputs, tmp_path) as (groups, _, _):
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
