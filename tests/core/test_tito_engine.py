"""Sessions on the real engine: retries, forks, cancelled turns and new weights, and every sampled token is what the trainer computes.

    python -m pytest tests/core/test_tito_engine.py
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_core import pack
from miles_core.assets import TINY
from miles_core.engine.engine import Engine, SamplingParams
from miles_core.model import hf
from miles_core.model.attend import PackedAttend
from miles_core.model.transformer import Transformer
from miles_core.parity import Gate
from miles_core.route_transport import Fetch, RouteStore
from miles_core.routing import BalanceParams, TrainRoutes, encode
from miles_core.schema import Prompt
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.episodes import AgentSession, EpisodeOver
from miles_core.tito.player import MAX_STARTS, Player
from miles_core.tito.render import Renderer
from miles_core.tito.samples import Sample, collect
from miles_core.tito.session import Session
from miles_core.tito.verify import renderer_for

PARAMS = SamplingParams(1.0, 1.0, 0, 12, hf.load_stop_ids(TINY))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(hf.load_tokenizer(TINY))


def make_engine(**changes: object) -> Engine:
    sizes = {"num_pages": 900, "max_batch_tokens": 700, "max_sequences": 48, "routing_replay": "on"}
    return Engine(hf.load(TINY), hf.load_tokenizer(TINY), seed=3, **{**sizes, **changes})


async def drive(engine: Engine, backend: EngineBackend, work: asyncio.Future, at_step: dict | None = None) -> None:
    """Step the engine on the loop of the sessions until the work is done."""
    for step in range(100_000):
        if work.done():
            return
        for _ in range(4):
            await asyncio.sleep(0)
        backend.pump()
        if at_step and step in at_step:
            at_step[step]()
        for completion in engine.step():
            assert backend.finish(completion)
    raise AssertionError("the sessions did not end")


async def wander(session: Session, seed: int, turns: int) -> int:
    """A client that goes on, asks again, goes back and goes away, at random. Returns how many turns it cancelled."""
    rng, cancelled = random.Random(seed), 0
    branches: list[list[dict]] = [[]]
    for _ in range(turns):
        messages = branches[rng.randrange(len(branches))] if rng.random() < 0.3 else branches[-1]
        asked = [*messages, {"role": "tool" if messages else "user", "content": "".join(rng.choices("0123456789+ ", k=rng.randint(1, 12)))}]
        for _ in range(2 if rng.random() < 0.2 else 1):  # asked twice: a retry
            task = asyncio.ensure_future(session.chat(asked, params=PARAMS))
            if rng.random() < 0.1:
                for _ in range(rng.randint(0, 12)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                reply = await task
            except asyncio.CancelledError:
                cancelled += 1
                continue
            if reply.finish != "length":
                branches.append([*asked, reply.message])
    return cancelled


def differing(model: Transformer, samples: list[Sample], version: int) -> tuple[int, int]:
    """(tokens of this version compared with the trainer, those that differ), with recorded routes replayed."""
    store, moe, compared, wrong = RouteStore(0, None), model.config.moe, 0, 0
    for number, sample in enumerate(samples):
        t = sample.trajectory
        t.group, t.verdict = number, 0
        recorded = np.arange(len(t.tokens)) < len(sample.routes.rows_RLK)
        store.keep(t, encode(sample.routes.rows_RLK, recorded))
    trajectories = [sample.trajectory for sample in samples]
    fetch, gate = Fetch(trajectories, store, None, moe, torch.device("cpu"), 1.0), Gate("report", "recompute", synchronous=False)
    for batch in map(fetch.attach, pack.pack(trajectories, 4096)):
        route = TrainRoutes(batch, moe, replay=True, passes=1, balance=BalanceParams())
        sampling = (batch.temperature_M, batch.top_p_M, batch.top_k_M)
        attend = PackedAttend(batch.cu_seqlens_S1, model.config.head_dim**-0.5)
        with torch.no_grad():
            logp_M, _ = model(batch.tokens_T, batch.positions_T, attend, batch.rows_M, batch.targets_M, sampling, route)
        seen = gate.watch(logp_M, batch, version, route)
        count = int(seen["train/logp_diff_tokens"].value())
        compared += count
        wrong += round(float(seen["train/logp_diff_frac"].value()) * count) if count else 0
    return compared, wrong


@pytest.mark.parametrize("changes", [{}, {"num_pages": 60, "max_sequences": 9, "max_batch_tokens": 90}], ids=["roomy", "cramped"])
def test_random_sessions_are_trained_on_what_was_sampled(renderer: Renderer, changes: dict) -> None:
    """32 sessions of 12 requests: masks recounted from the tree, no drift, and every log-prob the trainer's, to the bit."""
    engine = make_engine(**changes)
    backend = EngineBackend(engine)
    sessions = [Session(str(i), renderer, backend, group=i, sample=0, max_context=600) for i in range(32)]

    async def main() -> list[int]:
        work = asyncio.gather(*(wander(session, i, 12) for i, session in enumerate(sessions)))
        await drive(engine, backend, work)
        return await work

    assert sum(asyncio.run(main())) > 10 and engine.num_unfinished == 0 and backend.load == 0
    samples = []
    for session in sessions:
        mine = collect(session)
        for sample in mine:
            masked = sample.trajectory.tokens[sample.trajectory.loss_mask == 1]
            assert sample.drift.hard == 0, sample.drift
            assert set(masked.tolist()) <= {token for node in session.tree.nodes for token in node.sampled.tolist()}
        kept = {node.number for sample in mine for node in sample.leaf.branch()}
        assert sum(int(s.trajectory.loss_mask.sum()) for s in mine) == sum(len(session.tree.nodes[n].sampled) for n in kept)
        samples += mine
    compared, wrong = differing(engine.model, samples, 0)
    assert compared == sum(int(s.trajectory.loss_mask.sum()) for s in samples) > 2000 and wrong == 0


def test_new_weights_in_the_middle_of_sessions(renderer: Renderer) -> None:
    """Recompute: earlier turns keep their tokens, log-probs and routes; later ones are what the trainer computes with these routes."""
    engine = make_engine()
    backend = EngineBackend(engine)
    sessions = [Session(str(i), renderer, backend, group=i, sample=0, max_context=600) for i in range(16)]

    def change() -> None:
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.02)
        engine.set_version(1, "recompute")

    async def main() -> None:
        work = asyncio.gather(*(wander(session, 50 + i, 8) for i, session in enumerate(sessions)))
        await drive(engine, backend, work, {40: change})

    asyncio.run(main())
    samples = [sample for session in sessions for sample in collect(session)]
    versions = np.concatenate([s.trajectory.version_M for s in samples])
    assert 200 < versions.sum() < len(versions) - 200 and any(len(s.trajectory.version) == 2 for s in samples)
    compared, wrong = differing(engine.model, samples, 1)
    assert compared == versions.sum() and wrong == 0


# ---- episodes


def played(agent: object, renderer: Renderer, *, num: int = 3, **limits: object) -> list:
    """The answers of `num` episodes of an agent."""
    params = replace(PARAMS, max_new_tokens=limits.pop("max_new_tokens", 12))
    player = Player(make_engine(), params, agent, renderer, **{"max_context": 200, "max_turns": 4, "timeout_s": 20.0, **limits})
    for sample in range(num):
        player.add(Prompt(7, np.zeros(0, np.int32), "", {"secret": sample}, ({"role": "user", "content": "318807="},)), sample)
    answers = []
    while player.num_unfinished:
        answers += player.step()
    player.close()
    return sorted(answers, key=lambda answer: answer.trajectory.sample)


def test_an_episode_is_one_trajectory_of_all_its_turns(renderer: Renderer) -> None:
    async def agent(session: AgentSession, prompt: list[dict], metadata: dict) -> dict:
        messages = list(prompt)
        for _ in range(metadata["secret"] + 1):
            reply = await session.chat(messages)
            assert reply.finish == "stop"
            messages += [reply.message, {"role": "user", "content": "539214="}]
        return {"reward": metadata["secret"] / 2}

    answers = played(agent, renderer, max_new_tokens=150, max_context=1000)
    assert [answer.reward for answer in answers] == [0.0, 0.5, 1.0] and {answer.verdict for answer in answers} == {"ok"}
    for sample, answer in enumerate(answers):
        t = answer.trajectory
        assert (t.group, t.sample, len(t.turns)) == (7, sample, 2 * (sample + 1))
        assert np.array_equal(t.loss_mask, np.concatenate([np.full(n, i % 2) for i, n in enumerate(t.turns.tolist())]))
        assert answer.routes is not None


def test_how_episodes_end(renderer: Renderer) -> None:
    async def endless(session: AgentSession, prompt: list[dict], metadata: dict) -> None:
        messages = list(prompt)
        while True:
            reply = await session.chat(messages)
            messages += [reply.message, {"role": "user", "content": "539214="}]

    answers = played(endless, renderer, max_new_tokens=300, max_context=3000)
    assert [len(answer.trajectory.turns) for answer in answers] == [8] * 3, "no more turns than there are"
    (short,) = played(endless, renderer, num=1, max_context=60, max_turns=99)
    assert short.verdict == "ok" and short.reward is None and len(short.trajectory.tokens) <= 60

    async def slow(session: AgentSession, prompt: list[dict], metadata: dict) -> None:
        await session.chat(prompt)
        await asyncio.sleep(60)

    assert [(a.verdict, a.reward) for a in played(slow, renderer, timeout_s=0.5)] == [("timeout", None)] * 3

    async def broken(session: AgentSession, prompt: list[dict], metadata: dict) -> None:
        await session.chat(prompt)
        raise RuntimeError("a tool is gone")

    assert [(a.verdict, a.reward) for a in played(broken, renderer)] == [("infra_error", None)] * 3

    async def never(session: AgentSession, prompt: list[dict], metadata: dict) -> None:
        raise EpisodeOver("not one turn")

    with pytest.raises(RuntimeError, match=f"group 7 sample 0: {MAX_STARTS} episodes ended before their first turn: not one turn"):
        played(never, renderer, num=1)


def test_tokens_that_are_not_those_of_the_messages_stop_a_strict_run(renderer: Renderer) -> None:
    async def tampered(session: AgentSession, prompt: list[dict], metadata: dict) -> dict:
        await session.chat(prompt)
        tokens = session._session.tree.nodes[1].prompt
        tokens[tokens == renderer.encoder.control["<|im_start|>"]] = renderer.encoder.control["<|im_end|>"]
        return {"reward": 1.0}

    assert len(played(tampered, renderer)) == 3
    with pytest.raises(RuntimeError, match="group 7 sample 0: the tokens of the session drifted from their messages: Drift"):
        played(tampered, renderer, num=1, strict=True)
