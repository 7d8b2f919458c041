"""What is trained on: exact ids, masks as an independent count has them, shared tokens once; and drift by class.

python -m pytest tests/core/test_tito_samples.py
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from tito_models import FakeBackend, FakeTurn, sampling, tokenizer_of

from miles_core.schema import FINISH_REASONS, VERDICTS, group_nbytes, read_group, write_group
from miles_core.tito import drift, samples
from miles_core.tito.backend import TurnRequest
from miles_core.tito.corpus import CORPUS, TOOLS, Conversation
from miles_core.tito.errors import SessionError
from miles_core.tito.families import FAMILIES
from miles_core.tito.render import Renderer
from miles_core.tito.session import Reply, Session


class Episode:
    """A session whose answers are all different."""

    def __init__(self, family: str = "chatml", **options: Any) -> None:
        self.renderer = Renderer(tokenizer_of(family), family)
        self.count, self.end, self.finish, self.text = 0, None, "stop", "answer"
        backend = FakeBackend(self._say)
        self.session = Session("s", self.renderer, backend, **{"group": 5, "sample": 2, "max_context": 1 << 20, **options})
        self.turns: list[FakeTurn] = backend.turns

    def _say(self, request: TurnRequest) -> tuple[list[int], str]:
        self.count += 1
        ids = self.renderer.tokenizer.encode(f"{self.text} number {self.count:04}", add_special_tokens=False)
        return ids + (
            [self.renderer.encoder.control[self.end or self.renderer.family.ends[0]]] if self.finish == "stop" else []
        ), self.finish

    def chat(self, messages: list[dict], **options: Any) -> Reply:
        return asyncio.run(self.session.chat(messages, **{"params": sampling(), **options}))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def sampled_in(tokens: list[int], turns: list[FakeTurn]) -> dict[int, FakeTurn]:
    """Position -> the turn that sampled it, from what the engine was asked and said: every turn whose prompt and answer begin `tokens`."""
    found: dict[int, FakeTurn] = {}
    for turn in turns:
        prompt = turn.request.tokens.tolist()
        if tokens[: len(prompt) + len(turn.tokens)] == prompt + turn.tokens:
            for at in range(len(prompt), len(prompt) + len(turn.tokens)):
                assert at not in found, "two turns claim one token"
                found[at] = turn
    return found


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_random_sessions_equal_an_independent_count(seed: int) -> None:
    rng, episode = random.Random(seed), Episode()
    histories: list[list[dict]] = [[]]
    for _ in range(60):
        history = list(rng.choice(histories[-5:]))
        history = history[: rng.randrange(len(history) + 1)] if rng.random() < 0.25 else history
        if history and rng.random() < 0.1:
            history[-1] = {"role": history[-1]["role"], "content": "edited"}
        asked = [*history, user(rng.choice("ab"))]
        episode.finish = "length" if rng.random() < 0.1 else "stop"
        for _ in range(rng.choice([1, 1, 1, 2])):  # retries
            try:
                reply = episode.chat(asked)
            except SessionError as error:
                assert error.status == 409
                continue
            histories.append([*asked, reply.message])
    episode.session.finish(0.25)
    made = samples.collect(episode.session)
    assert len(made) > 3
    trained: dict[tuple[int, int], int] = {}
    for sample in made:
        t, tokens = sample.trajectory, sample.trajectory.tokens.tolist()
        t.check()
        owner = sampled_in(tokens, episode.turns)
        new = [at for at, turn in owner.items() if (id(turn), at) not in trained]
        assert np.flatnonzero(t.loss_mask).tolist() == sorted(new)
        trained |= {(id(owner[at]), at): 1 for at in new}
        position = [at - len(owner[at].request.tokens) for at in sorted(new)]
        results = [owner[at].made for at in sorted(new)]
        assert t.logp_roll[sorted(new)].tolist() == [r.logp[i] for r, i in zip(results, position, strict=True)]
        assert t.version_M.tolist() == [r.version[i] for r, i in zip(results, position, strict=True)]
        assert not t.logp_roll[t.loss_mask == 0].any()
        stretches = np.repeat(np.arange(len(t.turns)) % 2, t.turns)
        assert np.flatnonzero(stretches).tolist() == sorted(owner)
        assert sample.drift.hard == 0, sample.drift
    kept = {n for s in made for n in s.leaf.branch()}
    assert len(trained) == sum(len(n.sampled) for n in kept)
    group = [s.trajectory for s in made]
    buffer = bytearray(group_nbytes(group))
    write_group(group, memoryview(buffer))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(read_group(memoryview(buffer)), group, strict=True))


def test_a_sample_says_what_the_session_says() -> None:
    episode = Episode()
    first = episode.chat([user("a")])
    episode.finish = "length"
    episode.chat([user("a"), first.message, user("b")])
    episode.session.finish(0.75)
    (sample,) = samples.collect(episode.session)
    t = sample.trajectory
    assert (t.group, t.sample, t.reward, VERDICTS[t.verdict], FINISH_REASONS[t.finish]) == (5, 2, 0.75, "ok", "length")
    assert sample.routes == episode.turns[-1].made.routes
    assert len(t.turns) == 4 and t.tokens.tolist() == episode.turns[1].request.tokens.tolist() + episode.turns[1].tokens


def test_of_answers_to_one_request_the_one_that_went_on_last_stays() -> None:
    episode = Episode()
    a = [user("a")]
    first, retry = episode.chat(a), episode.chat(a)
    assert samples.last_attempts(episode.session.tree) == [retry.node]
    went_on = episode.chat([*a, first.message, user("b")])  # the client chose the first of two
    assert samples.last_attempts(episode.session.tree) == [went_on.node]
    rewound = episode.chat(a)  # and then began again
    assert samples.last_attempts(episode.session.tree) == [rewound.node]
    fork = episode.chat([user("something else")])  # another request is no retry
    assert samples.last_attempts(episode.session.tree) == [rewound.node, fork.node]
    episode.session.finish(1.0)
    assert [s.leaf for s in samples.collect(episode.session, lambda tree: tree.leaves)] == episode.session.tree.leaves


def test_shared_turns_are_trained_in_the_first_leaf_alone() -> None:
    episode = Episode()
    first = episode.chat([user("a")])
    leaves = [episode.chat([user("a"), first.message, user(text)]).node for text in "bcd"]
    episode.session.finish(1.0)
    made = samples.collect(episode.session)
    assert [s.leaf for s in made] == leaves
    assert [int(s.trajectory.loss_mask.sum()) for s in made] == [
        len(first.node.sampled) * (i == 0) + len(leaf.sampled) for i, leaf in enumerate(leaves)
    ]


@pytest.mark.parametrize("max_branches", [None, 4, 3, 2, 1])
def test_of_many_branches_the_latest_are_kept_and_their_shared_turns_with_them(max_branches: int | None) -> None:
    """Two turns, two ways on from the second, a new conversation, and one more way on from the first turn: four leaves."""
    episode = Episode()
    a = [user("a")]
    first = episode.chat(a)
    b = [*a, first.message, user("b")]
    second = episode.chat(b)
    leaves = [episode.chat([*b, second.message, user(text)]).node for text in "cd"]
    leaves += [episode.chat([user("summary")]).node, episode.chat([*a, first.message, user("e")]).node]
    episode.session.finish(0.5)
    made = samples.collect(episode.session, max_branches=max_branches)
    kept = leaves[-(max_branches or 4) :]
    assert [s.leaf for s in made] == kept
    turns = {node.number: node for leaf in kept for node in leaf.branch()}
    for sibling, t in enumerate(s.trajectory for s in made):
        assert (t.key, t.reward, VERDICTS[t.verdict]) == ((5, 2, sibling), 0.5, "ok")
        assert t.branches_dropped == 4 - len(kept)
        assert t.episode_tokens == sum(s.trajectory.num_trained for s in made) == sum(len(node.sampled) for node in turns.values())
        assert t.turns.sum() == kept[sibling].num_tokens and 0 < t.num_trained
    sampled = [tuple(t.logp_roll[t.loss_mask == 1].tolist()) for t in (s.trajectory for s in made)]
    assert sorted(sum(sampled, ())) == sorted(float(x) for node in turns.values() for x in node.logp), "each token in one sibling"


def test_cached_tokens_are_those_of_the_turns_that_are_trained() -> None:
    episode = Episode()
    first = episode.chat([user("a")])
    leaves = [episode.chat([user("a"), first.message, user(text)]).node for text in "bc"] + [episode.chat([user("d")]).node]
    for cached, node in enumerate((first.node, *leaves), 1):
        node.cached = 10**cached
    made = [sample.trajectory for sample in samples.collect(episode.session)]
    assert [(t.cached, t.cached_later) for t in made] == [(10 + 100, 100), (1000, 1000), (10_000, 0)]


def test_turns_of_another_distribution_are_a_sample_of_their_own() -> None:
    episode = Episode()
    first = episode.chat([user("a")])
    second = episode.chat([user("a"), first.message, user("b")], params=sampling(temperature=0.5))
    third = episode.chat([user("a"), first.message, user("b"), second.message, user("c")])
    episode.session.finish(1.0)
    hot, cold = samples.collect(episode.session)
    assert (hot.trajectory.temperature, cold.trajectory.temperature) == (1.0, 0.5)
    assert (hot.leaf, cold.leaf) == (third.node, second.node)
    assert hot.trajectory.loss_mask.sum() == len(first.node.sampled) + len(third.node.sampled)
    assert cold.trajectory.loss_mask.sum() == len(second.node.sampled) and len(cold.trajectory.tokens) == second.node.num_tokens


def test_a_session_that_ran_out_of_context_ends_for_length() -> None:
    episode = Episode(max_context=120)
    first = episode.chat([user("a")])
    with pytest.raises(SessionError) as error:
        episode.chat([user("a"), first.message, user("word " * 100)])
    assert error.value.code == "context_length_exceeded"
    episode.session.finish(0.0)
    (sample,) = samples.collect(episode.session)
    assert FINISH_REASONS[sample.trajectory.finish] == "length"


def test_a_verdict_without_a_reward_and_no_verdict_at_all() -> None:
    for verdict in ("infra_error", None):
        episode = Episode()
        episode.chat([user("a")])
        if verdict:
            episode.session.finish(None, verdict)
        (sample,) = samples.collect(episode.session)
        assert VERDICTS[sample.trajectory.verdict] == (verdict or "no_verdict")


def test_run_lengths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        versions = np.sort(rng.integers(0, 4, rng.integers(1, 12))).astype(np.int32)
        runs = samples.run_lengths(versions)
        assert np.repeat(runs[:, 0], runs[:, 1]).tolist() == versions.tolist() and (np.diff(runs[:, 0]) != 0).all()


# ---- drift


@pytest.mark.parametrize("family", list(FAMILIES))
def test_whatever_ends_an_answer_there_is_no_hard_drift(family: str) -> None:
    """Every end that the tokenizer has, a stop string's, and control tokens sampled in the middle of an answer."""
    episode = Episode(family)
    control = [token for token in episode.renderer.encoder.control if token not in episode.renderer.family.markup]
    messages = [user("a")]
    for end in [end for end in episode.renderer.family.ends if end in control] * 2:
        episode.end, episode.text = end, f"x {control[len(messages) % len(control)]} y"
        reply = episode.chat(messages, tools=TOOLS)
        messages += [reply.message, user(f"b {len(messages)}")]
    episode.session.backend.say = lambda request: (episode._say(request)[0][:-1], "stop")
    reply = episode.chat(messages, tools=TOOLS)
    episode.chat([*messages, reply.message, user("c")], tools=TOOLS)
    episode.session.finish(1.0)
    (sample,) = samples.collect(episode.session)
    assert sample.drift.hard == 0, sample.drift


@pytest.mark.parametrize("talk", CORPUS, ids=lambda talk: talk.name)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_whole_episodes_have_no_hard_drift(family: str, talk: Conversation) -> None:
    """A model that says what the template would write: its answers go through the parser and back, as the client's messages."""
    episode, messages, done = Episode(family), [], 0
    renderer = episode.renderer
    for i in [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]:
        try:
            answer = renderer.sampled(talk.messages[: i + 1], talk.tools, talk.template_kwargs).tolist()
            if renderer.family.header_ends and i + 1 < len(talk.messages) and talk.messages[i + 1]["role"] == "tool":
                answer[-1] = renderer.encoder.control["<|observation|>"]
            episode.session.backend.say = lambda _, answer=answer: (answer, "stop")
            messages += [{key: x for key, x in message.items() if key != "tool_call_id"} for message in talk.messages[done:i]]
            reply = episode.chat(messages, tools=talk.tools, template_kwargs=talk.template_kwargs, params=sampling(1000))
        except SessionError as error:
            assert (family, talk.name) in (("llama3", "parallel calls"), ("deepseek-v3", "system in the middle")), error
            break
        messages, done = [*messages, reply.message], i + 1
    episode.session.finish(1.0)
    for sample in samples.collect(episode.session):
        assert sample.leaf.depth > 0 and sample.drift.hard == sample.drift.refused == 0, sample.drift
    assert len(episode.session.tree.leaves) <= 1


def two_turns() -> tuple[Renderer, np.ndarray, np.ndarray, np.ndarray]:
    """A renderer; kept ids, which of them were sampled, and a fresh rendering without drift."""
    renderer = Renderer(tokenizer_of("chatml"), "chatml")
    messages = [user("what"), {"role": "assistant", "content": "the roof"}, user("and")]
    kept = renderer.first(messages[:1], None, {}).tokens
    answer = renderer.sampled(messages[:2], None, {})
    rest = renderer.later(int(answer[-1]), messages[2:], None, {}).tokens
    sampled = np.repeat((False, True, False), (len(kept), len(answer), len(rest)))
    return renderer, np.concatenate((kept, answer, rest)), sampled, renderer.whole(messages, None, {}, True)


def found(renderer: Renderer, kept: np.ndarray, sampled: np.ndarray, fresh: np.ndarray) -> dict[str, int]:
    measured = drift.measure(renderer, kept, sampled, fresh)
    counts = {name: getattr(measured, name) for name in (*drift.HARD, *drift.SOFT)}
    assert bool(measured.first) == any(counts.values())
    return {name: n for name, n in counts.items() if n}


def test_every_class_of_drift_is_told_from_the_others() -> None:
    renderer, kept, sampled, fresh = two_turns()
    start, end = (renderer.encoder.control[mark] for mark in ("<|im_start|>", "<|im_end|>"))
    encode = renderer.tokenizer.encode
    assert found(renderer, kept, sampled, fresh) == {}
    lost = int(np.flatnonzero((kept == start) & ~sampled)[-1])
    assert found(renderer, np.delete(kept, lost), np.delete(sampled, lost), fresh) == {"special_count": 1}
    changed = kept.copy()
    changed[lost] = end
    assert found(renderer, changed, sampled, fresh) == {"special_type": 1}
    changed = kept.copy()
    changed[lost - 3] = encode("Z")[0]
    assert found(renderer, changed, sampled, fresh) == {"other_text": 1}
    first = int(np.flatnonzero(sampled)[0])
    changed = kept.copy()
    changed[first] = encode("Z")[0]
    assert found(renderer, changed, sampled, fresh) == {"assistant_text": 1}
    letters = np.array([i for letter in "the roof" for i in encode(letter)])
    answer = int(sampled.sum()) - 1
    assert len(letters) > answer
    respelt = np.concatenate((kept[:first], letters, kept[first + answer :]))
    mask = np.concatenate((sampled[:first], np.ones(len(letters), bool), sampled[first + answer :]))
    assert found(renderer, respelt, mask, fresh) == {"retokenised": 1}


def test_without_a_header_of_answers_nothing_but_sampled_text_is_the_assistants() -> None:
    renderer = Renderer(tokenizer_of("default"), "default")
    kept = renderer.first([user("what")], None, {}).tokens
    fresh = renderer.first([user("that")], None, {}).tokens
    assert found(renderer, kept, np.zeros(len(kept), bool), fresh) == {"other_text": 1}


def test_a_template_that_refuses_what_was_said_is_counted() -> None:
    episode = Episode("llama3")
    reply = episode.chat([user("a")])
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply.node.messages = (user("a"), {"role": "assistant", "content": "", "tool_calls": [call, call]})
    episode.session.finish(1.0)
    (sample,) = samples.collect(episode.session)
    assert (sample.drift.refused, sample.drift.hard) == (1, 0) and "one call only" in sample.drift.first
