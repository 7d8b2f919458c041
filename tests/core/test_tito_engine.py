"""Sessions on the real engine: retries, forks, cancelled turns and new weights, and every sampled token is what the trainer computes.

    python -m pytest tests/core/test_tito_engine.py
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tito_traffic import Client, Ear, Hits, Traffic, agents, change, differing, later, mask_errors, play, prefix_violations

from miles_core.assets import TINY
from miles_core.engine.engine import Completion, Engine, SamplingParams
from miles_core.engine.sequence import Rows
from miles_core.model import hf
from miles_core.routing import row_nbytes
from miles_core.schema import Prompt
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.episodes import AgentSession, EpisodeOver
from miles_core.tito.player import MAX_STARTS, Player
from miles_core.tito.render import Renderer
from miles_core.tito.samples import collect
from miles_core.tito.session import Session
from miles_core.tito.verify import renderer_for

PARAMS = SamplingParams(1.0, 1.0, 0, 12, hf.load_stop_ids(TINY))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(hf.load_tokenizer(TINY))


def make_engine(**changes: object) -> Engine:
    sizes = {"num_pages": 900, "max_batch_tokens": 700, "max_sequences": 48, "routing_replay": "on"}
    return Engine(hf.load(TINY), hf.load_tokenizer(TINY), seed=3, **{**sizes, **changes})


def make_clients(backend: EngineBackend, renderer: Renderer, num: int, traffic: Traffic, seed: int = 0) -> list[Client]:
    return [
        Client(Session(str(i), renderer, Ear(backend), group=i, sample=0, max_context=2000), seed + i, traffic) for i in range(num)
    ]  # fmt: skip


def checked(engine: Engine, clients: list[Client]) -> None:
    """Prompts go on from what was sampled, no drift, masks recounted, and every log-prob the trainer's, to the bit."""
    samples = []
    for client in clients:
        mine = collect(client.session)
        assert prefix_violations(client) == mask_errors(client, mine) == sum(sample.drift.hard for sample in mine) == 0
        samples += mine
    compared, wrong = differing(engine.model, samples, 0)
    assert compared == sum(int(s.trajectory.loss_mask.sum()) for s in samples) > 2000 and wrong == 0


def test_random_sessions_are_trained_on_what_was_sampled(renderer: Renderer) -> None:
    """32 sessions of 12 requests, on an engine that is short of pages, lanes and budget."""
    engine = make_engine(num_pages=60, max_sequences=9, max_batch_tokens=90)
    clients = make_clients(backend := EngineBackend(engine), renderer, 32, Traffic(PARAMS))
    play(engine, backend, clients, 12)
    assert sum(client.cancelled for client in clients) > 10
    checked(engine, clients)


def test_agents_at_once_compute_new_tokens_only(renderer: Renderer) -> None:
    """64 sessions of 20 requests whose prompts begin alike: a turn computes what it brings, and the one token that was sampled last."""
    engine = make_engine(num_pages=2500, max_sequences=64, max_batch_tokens=1024)
    traffic = agents(PARAMS.stop_token_ids, engine.model.config.vocab_size)
    clients = make_clients(backend := EngineBackend(engine), renderer, 64, traffic)
    play(engine, backend, clients, 20)
    turns = later(clients)
    assert len(turns) > 1000 and max(turn.node.depth for turn in turns) > 15 and Hits.of(turns).rate >= 0.98
    for turn in turns:
        computed = len(turn.request.tokens) - turn.result.cached
        assert 1 <= computed <= len(turn.node.prompt) + 1, "a retry may compute less"
    checked(engine, clients)


def test_new_weights_in_the_middle_of_sessions(renderer: Renderer) -> None:
    """Recompute: earlier turns keep their tokens, log-probs and routes; later ones are what the trainer computes with these routes."""
    engine = make_engine()
    clients = make_clients(backend := EngineBackend(engine), renderer, 16, Traffic(PARAMS), 50)
    play(engine, backend, clients, 8, lambda step: change(engine, "recompute") if step == 40 else None)
    samples = [sample for client in clients for sample in collect(client.session)]
    versions = np.concatenate([s.trajectory.version_M for s in samples])
    assert 200 < versions.sum() < len(versions) - 200 and any(len(s.trajectory.version) == 2 for s in samples)
    compared, wrong = differing(engine.model, samples, 1)
    assert compared == versions.sum() and wrong == 0


class Keeper(EngineBackend):
    """Keeps the rows of every answer whole, by the identity of its request."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rows: dict[int, Rows] = {}

    def finish(self, completion: Completion) -> bool:
        self.rows[id(self.turns[completion.number].request)] = completion.rows
        return super().finish(completion)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_turn_holds_the_routes_of_its_own_tokens(renderer: Renderer, on_update: str) -> None:
    """What is recorded of a token stays, whatever computes it again; so the turns of a branch have it in parts, and each byte once."""
    engine = make_engine(num_pages=12, max_sequences=9)
    clients = make_clients(backend := Keeper(engine), renderer, 12, Traffic(PARAMS))
    play(engine, backend, clients, 12, lambda step: change(engine, on_update) if step % 40 == 39 else None)
    assert engine.version > 2 and engine.counters.tokens_recomputed > 500
    for client in clients:
        for turn in client.turns:
            whole, joined, before = backend.rows[id(turn.request)], turn.node.branch_routes(), turn.request.routes
            assert len(whole.version_R) == turn.node.num_tokens - 1
            assert torch.equal(joined.rows_RLK, whole.rows_RLK) and np.array_equal(joined.version_R, whole.version_R)
            assert before is None or torch.equal(before.rows_RLK, whole.rows_RLK[: len(before.version_R)])
        tree, held = client.session.tree, [node.routes for node in client.session.tree.nodes[1:]]
        size = sum(rows.rows_RLK.untyped_storage().nbytes() + rows.version_R.nbytes for rows in held)
        assert size == (row_nbytes(engine.model.config.moe) + 4) * (tree.num_tokens - len(tree.root.children))
        assert all(rows.version_R.base is None for rows in held), "a view keeps all of what it is a part of"
        answers = {turn.node.number: backend.rows[id(turn.request)] for turn in client.turns}
        for sample in collect(client.session):
            assert torch.equal(sample.routes.rows_RLK, answers[sample.leaf.number].rows_RLK)


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
