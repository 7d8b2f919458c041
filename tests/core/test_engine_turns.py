"""What conversations ask of the engine: tokens as they come, requests that are dropped, and a prefix cache that goes on where a turn ended.

    python -m pytest tests/core/test_engine_turns.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, random_model

from kernels.attention import PAGE
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model.transformer import Transformer

WAY = SamplingParams(1.0, 1.0, 0, 9, ())


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return random_model(CONFIGS[request.param])


def make_engine(model: Transformer, **changes: object) -> Engine:
    sizes = {"num_pages": 60, "max_batch_tokens": 200, "max_sequences": 12, "routing_replay": "on" if model.config.moe else "off"}
    return Engine(model, None, seed=5, **{**sizes, **changes})


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 131, length).astype(np.int32)


def test_watchers_hear_every_token_as_it_is_sampled(model: Transformer) -> None:
    engine, heard = make_engine(model), {}
    for sample in range(3):
        number = engine.add(Request(0, sample, prompt(70), WAY, top_logprobs=4 * sample))
        engine.watch(number, lambda token, logp, top, number=number: heard.setdefault(number, []).append((token, logp, top)))
    done = []
    while engine.num_unfinished:
        before = sum(map(len, heard.values()))
        done += engine.step()
        assert sum(map(len, heard.values())) - before <= 3
    for completion in done:
        t, mine = completion.trajectory, heard[completion.number]
        assert [token for token, _, _ in mine] == t.tokens[70:].tolist()
        assert [np.float32(logp) for _, logp, _ in mine] == t.logp_roll[70:].tolist()
        for token, logp, top in mine:
            assert len(top) == 4 * t.sample and [p for _, p in top] == sorted((p for _, p in top), reverse=True)
            assert token not in dict(top) or dict(top)[token] == pytest.approx(logp, abs=1e-5)
    assert not engine._watchers


def test_a_dropped_request_leaves_no_trace(model: Transformer) -> None:
    """Running, waiting or leading its siblings: the others get the tokens they would have had, and every page comes back."""
    expected = [c.trajectory for c in make_engine(model).generate([Request(g, s, prompt(80, g), WAY) for g in range(2) for s in range(3)])]
    engine = make_engine(model, max_sequences=4, max_batch_tokens=50)
    numbers = {(g, s): engine.add(Request(g, s, prompt(80, g), WAY)) for g in range(2) for s in range(3)}
    extra = [engine.add(Request(7, s, prompt(80, s % 2), SamplingParams(1.0, 1.0, 0, 60, ()))) for s in range(4)]
    assert engine.cancel(extra[0]), "waiting"
    done = {}
    for step in range(10_000):
        if step == 3:
            assert engine.cancel(numbers[0, 0]), "the leader of its prompt"
        if step == 12:
            assert engine.cancel(extra[1]) and not engine.cancel(extra[1])
        if not engine.num_unfinished:
            break
        done.update((c.number, c.trajectory) for c in engine.step())
    assert not engine.cancel(numbers[1, 1]), "it has ended"
    assert set(done) == {*numbers.values(), *extra[2:]} - {numbers[0, 0]}
    for t in expected:
        if (t.group, t.sample) != (0, 0):
            found = done[numbers[t.group, t.sample]]
            assert np.array_equal(found.tokens, t.tokens) and np.array_equal(found.logp_roll, t.logp_roll)
    assert engine.pool.available == engine.pool.num_pages


@pytest.mark.parametrize("num_pages", [60, 6])
def test_a_conversation_is_one_sequence_to_the_cache(model: Transformer, num_pages: int) -> None:
    """Twenty turns: only the new tokens are computed, and every log-prob is that of a conversation that was never interrupted."""
    engine, tokens, rows, hits, sampled = make_engine(model, num_pages=num_pages), prompt(30), None, [], []
    for turn in range(20):
        completion = engine.generate([Request(3, 0, tokens, WAY, rows)])[0]
        t = completion.trajectory
        hits.append((t.cached, len(tokens)))
        sampled.append((len(tokens), t.logp_roll[len(tokens) :]))
        if model.config.moe:
            assert len(completion.rows.version_R) == len(t.tokens) - 1
            assert rows is None or torch.equal(completion.rows.rows_RLK[: len(rows.rows_RLK)], rows.rows_RLK)
            rows = completion.rows
        tokens = np.concatenate([t.tokens, prompt(3, 100 + turn)])
        if num_pages == 6:  # another conversation in between takes the pages away
            engine.generate([Request(9, turn, prompt(5 * PAGE, turn), WAY)])
    if num_pages == 60:
        assert all(cached == length - 4 for cached, length in hits[1:]), "all but the last sampled token and what the other side said"
        assert engine.counters.prompt_tokens_computed == 30 + 19 * (1 + 3)
    whole = make_engine(model)
    for length, logp in sampled:
        again = whole.generate([Request(3, 0, tokens[:length], WAY)])[0].trajectory
        assert np.array_equal(again.tokens[length:], tokens[length : length + 9]) and np.array_equal(again.logp_roll[length:], logp)


def test_a_branch_shares_what_it_has_in_common(model: Transformer) -> None:
    engine, base = make_engine(model), prompt(2 * PAGE + 40)
    engine.generate([Request(0, 0, base, WAY)])
    for at in (20, PAGE + 33, 2 * PAGE + 10):
        branch = base.copy()
        branch[at] = (branch[at] + 1) % 131
        assert engine.generate([Request(1, at, branch, WAY)])[0].trajectory.cached == at
