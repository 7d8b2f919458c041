"""The rollout rank's loop on one page: claim -> generate -> reward -> advantage -> ring.

train.py starts it on the rollout ranks of a torchrun. Alone it evaluates or tries a checkpoint:

    python rollout.py --model runs/X/checkpoints/latest --task sort --eval --eval-samples 4
    python rollout.py --model DIR --generate "What is 3 + 4?"
    torchrun --nproc-per-node 2 rollout.py --model DIR --task arithmetic --eval     # ranks share the prompts
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from miles_core import guard, numerics, tasks
from miles_core.advantage import ADVANTAGES
from miles_core.config import Config, parse_args
from miles_core.engine import Completion, Engine, Request, SamplingParams
from miles_core.metrics import Mean, Metric, merge
from miles_core.model import hf
from miles_core.ring import Claim, Ring
from miles_core.schema import VERDICTS, Prompt
from miles_core.tasks.rewards import RewardPool
from miles_core.topology import Topology, layout_from_env
from miles_core.weights import Receiver

EVAL_GROUP = 1 << 62  # group numbers of evaluation start here, so that their sampling noise is nobody else's


@dataclass
class Group:
    """A group in flight on this rank."""

    claim: Claim
    prompt: Prompt
    done: dict[int, Completion] = field(default_factory=dict)
    num_rewarded: int = 0


class Rollout:
    """One rollout rank. `tick()` does a little of everything and never waits, so a colocated rank can interleave it with training."""

    def __init__(self, config: Config, engine: Engine, task: tasks.Task, tokenizer: hf.Tokenizer, ring: Ring, weights: Receiver, index: int):
        self.config, self.engine, self.task, self.tokenizer = config, engine, task, tokenizer
        self.ring, self.weights, self.index = ring, weights, index
        self.rewards = RewardPool(config.task, config.seed, config.data, config.eval_data, config.reward_workers, config.reward_timeout)
        self.params = sampling_params(config, engine)
        self.open: dict[int, Group] = {}
        # A fair share of the slots: the first rank to look must not admit every group of a step while the others idle.
        self.max_open = math.ceil(ring.num_slots / ring.num_rollout_ranks)

    def tick(self) -> bool:
        """Take new weights, admit, decode one token of everything, hand finished groups over. Returns False when there was nothing to do."""
        self.refresh()
        admitted = self.admit()
        for completion in self.engine.step():
            group = self.open[completion.trajectory.group]
            group.done[completion.trajectory.sample] = completion
            self.rewards.submit((completion.trajectory.group, completion.trajectory.sample), group.prompt.answer, completion.text)
        for (number, sample), reward, verdict, _ in self.rewards.poll():
            group = self.open[number]
            trajectory = group.done[sample].trajectory
            trajectory.reward, trajectory.verdict = reward, VERDICTS.index(verdict)
            group.num_rewarded += 1
            if group.num_rewarded == self.config.samples_per_prompt:
                self.finish(self.open.pop(number))
        return admitted or self.engine.num_unfinished > 0

    def refresh(self, min_version: int | None = None) -> None:
        """Load the newest published weights, if they are new. With `min_version`: wait until at least that version is there."""
        version = self.weights.receive(min_version)
        if version is not None:
            self.engine.set_version(version, self.config.on_update)
            self.ring.set_live(self.index, version)

    def admit(self) -> bool:
        """Claim group numbers while the pacing and this rank's share allow, and queue their samples."""
        admitted = False
        while len(self.open) < self.max_open and (claim := self.ring.claim(self.index)) is not None:
            prompt = tasks.make_prompt(self.task, self.tokenizer, claim.group, "train")
            self.open[claim.group] = Group(claim, prompt)
            for sample in range(self.config.samples_per_prompt):
                self.engine.add(Request(claim.group, sample, prompt.tokens, self.params))
            admitted = True
        return admitted

    def finish(self, group: Group) -> None:
        """Rewards of a whole group -> advantages -> ring. From here on the trajectories are frozen."""
        trajectories = [group.done[sample].trajectory for sample in range(self.config.samples_per_prompt)]
        ok = np.array([t.verdict == VERDICTS.index("ok") for t in trajectories])
        advantages = ADVANTAGES[self.config.advantage](np.array([t.reward for t in trajectories]), ok)
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            trajectory.advantage = float(advantage)
        self.ring.put(group.claim, trajectories)

    def run(self) -> None:
        """The life of a dedicated rollout rank: until the trainer says stop."""
        idle_since = None
        while not self.ring.stopped:
            if self.tick():
                idle_since = None
                continue
            now = time.monotonic()
            if idle_since is not None and not self.open:
                self.ring.add_blocked(self.index, now - idle_since)  # no slot is free: the trainer is the bottleneck
            idle_since = now
            time.sleep(0.0005)

    def evaluate(self, shard: int, num_shards: int) -> dict[str, Metric]:
        return evaluate(self.config, self.engine, self.rewards, self.task, self.tokenizer, shard, num_shards)

    def close(self) -> None:
        self.rewards.close()


def sampling_params(config: Config, engine: Engine) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.max_new_tokens, engine.stop_token_ids)


def make_engine(config: Config, model: torch.nn.Module, tokenizer: hf.Tokenizer, stop_token_ids: tuple[int, ...]) -> Engine:
    return Engine(
        model, tokenizer, seed=numerics.derive_seed(config.seed, "sampling"), stop_token_ids=stop_token_ids, max_context=context(config, model.config.max_position),
        num_pages=..., max_batch_tokens=config.prefill_tokens, max_sequences=config.max_sequences,
    )
