"""The rollout rank's loop on one page: claim -> generate -> reward -> advantage -> ring.

train.py starts it on the rollout ranks of a torchrun. Alone it evaluates or tries a checkpoint:

    python rollout.py --model runs/X/checkpoints/latest --task sort --eval --eval-samples 4
    python rollout.py --model DIR --generate "What is 3 + 4?"
    python rollout.py --model DIR --serve                                           # sessions over HTTP, as the OpenAI API
    torchrun --nproc-per-node 2 rollout.py --model DIR --task arithmetic --eval     # ranks share the prompts
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from kernels import cpu
from kernels.dispatch import use_fast
from kernels.invariance import self_test
from miles_core import guard, numerics, tasks
from miles_core.advantage import ADVANTAGES
from miles_core.assets import TINY
from miles_core.config import Config, parse_args
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.metrics import Mean, Metric, merge
from miles_core.model import hf
from miles_core.model.layers import named_weights
from miles_core.model.moe import MoEConfig
from miles_core.model.transformer import ModelConfig, Transformer
from miles_core.ring import Claim, Ring
from miles_core.route_transport import Mailbox, RouteStore
from miles_core.schema import VERDICTS, Prompt
from miles_core.tasks.rewards import RewardPool
from miles_core.tito.agents import HTTP, load_agent
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.loop import Loop
from miles_core.tito.player import Answer, Player
from miles_core.tito.serve import serve
from miles_core.tito.server import make_app
from miles_core.tito.sessions import Sessions
from miles_core.tito.verify import renderer_for
from miles_core.topology import Topology, layout_from_env
from miles_core.weights import Receiver

EVAL_GROUP = 1 << 62  # group numbers of evaluation start here, so that its sampling noise is nobody else's
OK = VERDICTS.index("ok")
IDLE_S = 0.0005
TOKEN = "MILES_SERVE_TOKEN"  # environment variable: never on a command line, which everybody can read


@dataclass
class Group:
    """A group in flight on this rank."""

    claim: Claim
    prompt: Prompt
    done: dict[int, Answer] = field(default_factory=dict)
    num_rewarded: int = 0


class Rollout:
    """One rollout rank. `tick()` does a little of everything and never waits, so that a colocated rank can alternate it with training.

    `routes` holds what the engine has recorded of a mixture of experts, until the training ranks ask for it in the mailbox.
    """

    def __init__(
        self, config: Config, inputs: Inputs, model: Transformer, ring: Ring, weights: Receiver, index: int,
        routes: RouteStore, mailbox: Mailbox | None,
    ):  # fmt: skip
        self.config, self.inputs, self.ring, self.weights, self.index = config, inputs, ring, weights, index
        self.routes, self.mailbox = routes, mailbox
        # A fair share of the slots: the first rank to look must not admit every group of a step while the others idle.
        self.max_open = math.ceil(ring.num_slots / ring.num_rollout_ranks)
        self.engine = make_engine(config, inputs, model, self.max_open)
        self.player = make_player(config, inputs, self.engine)
        if self.player.offers is not None:
            self.player.offers.share(ring, index)
        self.rewards = make_rewards(config)
        self.open: dict[int, Group] = {}

    def tick(self) -> bool:
        """Take new weights, admit, decode one token of every sequence, hand finished groups over. False when there was nothing to do."""
        self.refresh()
        self.serve_routes()
        admitted = self.admit()
        for answer in self.player.step():
            number, sample = answer.trajectory.group, answer.trajectory.sample
            self.open[number].done[sample] = answer
            if answer.reward is None and answer.verdict == "ok":
                self.rewards.submit((number, sample), self.open[number].prompt.answer, answer.text)
            else:
                self.judge(number, sample, answer.reward or 0.0, answer.verdict)
        for (number, sample), reward, verdict, _ in self.rewards.poll():
            self.judge(number, sample, reward, verdict)
        return admitted or self.engine.num_unfinished > 0

    def judge(self, number: int, sample: int, reward: float, verdict: str) -> None:
        """The reward of one sample; the last one of its group finishes it."""
        group = self.open[number]
        for trajectory in group.done[sample].trajectories:
            trajectory.reward, trajectory.verdict = reward, VERDICTS.index(verdict)
        group.num_rewarded += 1
        if group.num_rewarded == self.config.samples_per_prompt:
            self.finish(self.open.pop(number))

    def refresh(self, min_version: int | None = None) -> None:
        """Load the newest published weights if they are new; with `min_version`, wait until at least that version is there."""
        version = self.weights.receive(named_weights(self.engine.model), min_version)
        if version is not None:
            self.engine.set_version(version, self.config.on_update)
            self.ring.set_live(self.index, version)

    def serve_routes(self) -> None:
        """Send the routes that training ranks have asked for since the last look."""
        if self.mailbox is not None:
            self.routes.serve(self.mailbox.poll(self.routes.rank))

    def admit(self) -> bool:
        """Claim group numbers while pacing and this rank's share allow it, and queue their samples."""
        admitted = False
        while len(self.open) < self.max_open and (claim := self.ring.claim(self.index)) is not None:
            prompt = make_prompt(self.config, self.inputs, claim.group, "train")
            self.open[claim.group] = Group(claim, prompt)
            for sample in range(self.config.samples_per_prompt):
                self.player.add(prompt, sample)
            admitted = True
        return admitted

    def finish(self, group: Group) -> None:
        """Rewards of a whole group -> advantages -> ring. From here on the trajectories are frozen."""
        answers = [group.done[sample] for sample in range(self.config.samples_per_prompt)]
        rewards = np.array([answer.trajectory.reward for answer in answers])
        ok = np.array([answer.trajectory.verdict == OK for answer in answers])
        for answer, advantage in zip(answers, ADVANTAGES[self.config.advantage](rewards, ok), strict=True):
            for trajectory, routes in zip(answer.trajectories, answer.routes, strict=True):
                trajectory.advantage = float(advantage)
                if routes is not None:
                    self.routes.keep(trajectory, routes)
        self.ring.put(group.claim, [trajectory for answer in answers for trajectory in answer.trajectories])

    def evaluate(self, shard: int, num_shards: int) -> dict[str, Metric]:
        metrics = evaluate(self.config, self.inputs, self.player, self.rewards, shard, num_shards)
        if (offers := self.player.offers) is not None:
            offers.end_evaluation()
            deadline = time.monotonic() + self.config.timeout
            while offers.evaluating():  # answering harnesses meanwhile
                self.player.step()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {self.config.timeout:g} s for the other rollout ranks of this node to end their evaluation")
                time.sleep(IDLE_S)
        return metrics

    def close(self) -> None:
        self.player.close()
        self.rewards.close()

    def run(self) -> None:
        """The life of a dedicated rollout rank: until the trainer says stop."""
        blocked_since = None
        while not self.ring.stopped:
            if self.tick():
                blocked_since = None
                continue
            now = time.monotonic()
            if blocked_since is not None:
                self.ring.add_blocked(self.index, now - blocked_since)
                self.ring.expect_trainer(self.config.timeout)
            blocked_since = None if self.open else now  # nothing in flight and no free slot: the trainer is the bottleneck
            time.sleep(IDLE_S)


@dataclass(frozen=True)
class Inputs:
    """What every rank reads from disk, and checks, before any process group exists."""

    model_dir: Path
    model_config: ModelConfig
    tokenizer: hf.Tokenizer
    stop_token_ids: tuple[int, ...]
    task: tasks.Task
    max_context: int  # prompt + answer, tokens; of an episode each branch, all its turns
    max_turns: int  # answers in it
    max_branches: int  # trajectories that it may become


def load_inputs(config: Config, device: torch.device, dtype: torch.dtype) -> Inputs:
    model_dir = TINY if config.model == "tiny" else hf.resolve(config.model)
    model_config = hf.load_config(model_dir)
    hf.check_weights(model_dir, model_config)
    max_context = min(config.max_context, model_config.max_position)
    if config.max_new_tokens >= max_context:
        raise ValueError(
            f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt: --model {config.model} takes {max_context}"
        )
    task = tasks.load(config.task, config.seed, config.data, config.eval_data)
    choose_kernels(model_config, device, dtype, config.parity)
    check_router(config, model_config.moe)
    max_turns = max_branches = 1
    if agent := agent_name(config, task):
        if agent != HTTP:
            load_agent(agent)
        max_turns, max_branches = config.max_turns, min(config.max_branches, config.max_turns)  # each has a turn of its own
    elif config.serve_port and not config.serve:
        raise ValueError(f"--serve-port: --task {config.task} has no agent, so there are no sessions to serve; give one with --agent")
    if config.micro_batch_tokens < max_context:
        raise ValueError(f"--micro-batch-tokens {config.micro_batch_tokens} cannot hold one sample of --max-context {max_context}")
    tokenizer = hf.load_tokenizer(model_dir)
    stop_ids = hf.load_stop_ids(model_dir, tokenizer)
    return Inputs(model_dir, model_config, tokenizer, stop_ids, task, max_context, max_turns, max_branches)


def check_router(config: Config, moe: MoEConfig | None) -> None:
    """Refuse flags of the router that this model has no use for."""
    flags = ["router_balance_coef", "router_z_coef", "router_bias_rate", "freeze_router"]
    for flag in (f for f in flags if moe is None and getattr(config, f)):
        raise ValueError(f"--{flag.replace('_', '-')} is for a mixture of experts, and --model {config.model} is dense: leave it out")
    num_experts = 0 if moe is None else moe.num_experts
    if config.expert_parallel > 1 and (not num_experts or num_experts % config.expert_parallel):
        size = config.expert_parallel
        raise ValueError(f"--expert-parallel {size} does not divide the {num_experts} experts of --model {config.model}")
    if config.router_bias_rate and not moe.correction_bias:
        raise ValueError(
            f"--router-bias-rate: the routers of --model {config.model} have no correction bias; use --router-balance-coef instead"
        )


def choose_kernels(c: ModelConfig, device: torch.device, dtype: torch.dtype, parity: str) -> None:
    """Invariant ops, or fast ones with parity "off". See that the kernels take this model; a ValueError if not.

    And, with "strict", that no result depends on the batch on its shapes. The torch path of the CPU kernels is never used without.
    """
    use_fast(False)
    step, widest = (16, 256) if device.type == "cuda" else (8, 1 << 16)
    if c.head_dim % step or c.head_dim > widest:
        supported = f"supported: multiples of {step} up to {widest}"
        raise ValueError(f"attention: head size {c.head_dim} is not supported on {device.type}; {supported}")
    if parity == "strict" or (device.type == "cpu" and cpu.implementation() == "torch"):
        shapes = hf.expected_shapes(c).values()
        matrices, experts = ([shape for shape in shapes if len(shape) == ndim] for ndim in (2, 3))
        top_k = c.moe.top_k if c.moe is not None else 1
        self_test(matrices, c.head_dim, c.num_heads, c.num_kv_heads, c.vocab_size, device, dtype, experts, top_k)
    use_fast(parity == "off")


def make_prompt(config: Config, inputs: Inputs, group: int, split: str) -> Prompt:
    """Prompt number `group` of a split; a ValueError when it leaves no room for an answer."""
    prompt = tasks.make_prompt(inputs.task, inputs.tokenizer, group, split)
    room = inputs.max_context - config.max_new_tokens
    if len(prompt.tokens) > room:
        raise ValueError(
            f"--task {config.task}: {split} prompt {group} has {len(prompt.tokens)} tokens, but --max-context {inputs.max_context} less "
            f"--max-new-tokens {config.max_new_tokens} leaves {room}"
        )
    return prompt


def sampling_params(config: Config, inputs: Inputs) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.max_new_tokens, inputs.stop_token_ids)


def make_engine(config: Config, inputs: Inputs, model: Transformer, num_groups: int) -> Engine:
    """An engine with room for `num_groups` groups at their longest, or for what --kv-tokens says."""
    num_sequences = min(config.max_sequences, num_groups * config.samples_per_prompt)
    kv_tokens = config.kv_tokens or min(65536, num_sequences * inputs.max_context)
    return Engine(
        model, inputs.tokenizer, seed=numerics.derive_seed(config.seed, "sampling"), num_pages=max(1, kv_tokens // 64),
        max_batch_tokens=config.prefill_tokens, max_sequences=num_sequences, routing_replay=config.routing_replay,
    )  # fmt: skip


def agent_name(config: Config, task: tasks.Task) -> str:
    """Which agent plays: the one that was asked for, else the task's own; "" where an answer is one turn."""
    return config.agent or getattr(task, "agent", "")


def make_player(config: Config, inputs: Inputs, engine: Engine) -> Player:
    """With --serve-port it serves its sessions already."""
    params = sampling_params(config, inputs)
    if not (name := agent_name(config, inputs.task)):
        return Player(engine, params)
    renderer = renderer_for(inputs.tokenizer, ends=inputs.stop_token_ids)
    player = Player(
        engine, params, HTTP if name == HTTP else load_agent(name), renderer,
        max_context=inputs.max_context, max_turns=inputs.max_turns, max_branches=inputs.max_branches, timeout_s=config.episode_timeout,
        nobody_s=0.9 * config.timeout, strict=config.parity == "strict",  # sooner than the trainer, who knows less about the reason
    )  # fmt: skip
    if config.serve_port:
        rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        url = player.serve(config.serve_host, config.serve_port + local_rank, model=config.model, token=os.environ.get(TOKEN))
        start = f": python -m miles_core.tito.harness --url {url} --agent module:function" * (name == HTTP)
        print(f"rank {rank} serves its sessions at {url}{start}", flush=True)
    return player


def make_rewards(config: Config) -> RewardPool:
    return RewardPool(config.task, config.seed, config.data, config.eval_data, config.reward_workers, config.reward_timeout)


def evaluate(config: Config, inputs: Inputs, player: Player, rewards: RewardPool, shard: int, num_shards: int) -> dict[str, Metric]:
    """pass@1, pass@k and mean reward over this rank's share of the held-out prompts, as sums that the ranks merge.

    A sample passes when its reward is at least 1. pass@k (k = --eval-samples) is the share of prompts that any sample passes.
    Samples without the verdict ok are left out, and counted. Nothing with --eval-prompts 0.
    """
    if not config.eval_prompts:
        return {}
    numbers = range(shard, min(config.eval_prompts, inputs.task.num_eval), num_shards)
    prompts = [make_prompt(config, inputs, number, "eval") for number in numbers]
    samples = range(config.eval_samples)
    prompts = {EVAL_GROUP + p.group: replace(p, group=EVAL_GROUP + p.group) for p in prompts}
    for prompt in prompts.values():
        for sample in samples:
            player.add(prompt, sample)
    scores: dict[int, list[float]] = {number: [] for number in prompts}
    while player.num_unfinished or rewards.num_pending:  # ends: every episode and every reward has a deadline
        for answer in player.step():
            number = answer.trajectory.group
            if answer.reward is not None:
                scores[number].append(answer.reward)
            elif answer.verdict == "ok":
                rewards.submit(number, prompts[number].answer, answer.text)
        for number, reward, verdict, _ in rewards.poll():
            if verdict == "ok":
                scores[number].append(reward)
        if not player.engine.num_unfinished:
            time.sleep(IDLE_S)
    num_ok, passed = sum(map(len, scores.values())), [[r >= 1 for r in rs] for rs in scores.values() if rs]
    name = f"eval/{inputs.task.name}"
    metrics: dict[str, Metric] = {
        f"{name}/pass@1": Mean(sum(map(sum, passed)), num_ok),
        f"{name}/reward_mean": Mean(sum(map(sum, scores.values())), num_ok),
        f"{name}/not_ok_frac": Mean(len(prompts) * config.eval_samples - num_ok, len(prompts) * config.eval_samples),
    }
    if config.eval_samples > 1:
        metrics[f"{name}/pass@{config.eval_samples}"] = Mean(sum(map(any, passed)), len(passed))
    return metrics


def serve_sessions(config: Config, inputs: Inputs, engine: Engine) -> None:
    """Sessions over HTTP, for any harness that speaks the OpenAI chat API; see miles_core/tito/server.py. Ends with Ctrl-C or SIGTERM."""
    backend = EngineBackend(engine)
    sessions = Sessions(renderer_for(inputs.tokenizer, ends=inputs.stop_token_ids), backend, max_context=inputs.max_context)
    app = make_app(sessions, sampling_params(config, inputs), model=config.model, token=os.environ.get(TOKEN))
    loop = Loop()
    server = loop.run(serve(app, config.serve_host, config.serve_port))
    print(f"serving {config.model} at {server.url}: POST {server.url}/sessions for a base URL", flush=True)
    try:
        while True:
            loop.poll()
            server.check()
            backend.pump()
            for completion in engine.step():
                backend.finish(completion)
            if not engine.num_unfinished:
                time.sleep(IDLE_S)
    finally:
        loop.run(server.stop())
        loop.close()


def main() -> None:
    """Alone: evaluate a checkpoint, answer one message, or serve."""
    config = parse_args(sys.argv[1:], "rollout.py", __doc__)
    numerics.setup()
    if config.eval + config.serve + bool(config.generate) != 1:
        raise ValueError("say --eval to evaluate, --generate TEXT to answer one message, or --serve to serve sessions")
    layout = layout_from_env(0)
    device, dtype = numerics.choose(config.device, config.dtype, layout.local_rank)
    topo = Topology(layout, device, dtype, config.timeout)
    inputs = load_inputs(config, device, dtype)
    num_groups = config.max_sequences if config.serve else max(1, config.eval_prompts)
    engine = make_engine(config, inputs, hf.load(inputs.model_dir, device, dtype), num_groups)
    if config.generate:
        prompt = tasks.user_prompt(config.generate, inputs.tokenizer)
        print(engine.generate([Request(EVAL_GROUP, 0, prompt, sampling_params(config, inputs))])[0].text)
        return
    if config.serve:
        return serve_sessions(config, inputs, engine)
    player, rewards = make_player(config, inputs, engine), make_rewards(config)
    metrics = merge(topo.gather(evaluate(config, inputs, player, rewards, topo.rank, topo.layout.world_size)))
    player.close()
    rewards.close()
    if topo.rank == 0:
        for name, metric in metrics.items():
            print(f"{name}  {metric.value():.4f}")
    topo.close()


if __name__ == "__main__":
    guard.run(main)
