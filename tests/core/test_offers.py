"""Episodes that wait for a harness: who gets which, how they end, and where a harness is sent.

    python -m pytest tests/core/test_offers.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_tito_engine import PARAMS, make_engine

from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.ring import Ring
from miles_core.schema import Prompt
from miles_core.tito.agents import HTTP
from miles_core.tito.episodes import AgentSession
from miles_core.tito.errors import Elsewhere, SessionError
from miles_core.tito.player import MAX_STARTS, Answer, Player
from miles_core.tito.session import Session
from miles_core.tito.verify import renderer_for

RENDERER = renderer_for(hf.load_tokenizer(TINY))
QUESTION = ({"role": "user", "content": "318807="},)


def make_player(**limits: object) -> Player:
    options = {"max_context": 400, "max_turns": 2, "timeout_s": 20.0, **limits}
    return Player(make_engine(), replace(PARAMS, max_new_tokens=150), HTTP, RENDERER, **options)


def add(player: Player, sample: int) -> None:
    player.add(Prompt(7, np.zeros(0, np.int32), "", {"secret": sample}, QUESTION), sample)


def step_until(player: Player, count: int) -> list[Answer]:
    """Step until so many episodes have ended."""
    answers: list[Answer] = []
    for _ in range(100_000):
        answers += player.step()
        if len(answers) >= count:
            return answers
    raise AssertionError(f"{len(answers)} of {count} episodes ended")


def ask(player: Player, session: Session) -> None:
    """One turn."""
    task = player.loop.events.create_task(session.chat(list(QUESTION), params=player.params))
    while not task.done():
        player.step()
    task.result()


def test_episodes_are_taken_in_order_and_end_as_the_harness_says() -> None:
    player = make_player()
    for sample in range(4):
        add(player, sample)
    taken = [player.offers.take() for _ in range(4)]
    assert [(s.group, s.sample, more["metadata"]) for s, more in taken] == [(7, i, {"secret": i}) for i in range(4)]
    assert taken[0][1]["prompt"] == list(QUESTION) and taken[0][0].turns_left == 2
    with pytest.raises(SessionError, match="no episode waits") as error:
        player.offers.take()
    assert (error.value.status, error.value.code, error.value.retry_after) == (503, "no_episode", 1)
    rewarded, judged, failed, deleted = (session for session, _ in taken)
    for session, _ in taken:
        ask(player, session)
    player.sessions.finish(rewarded.id, 0.5, "ok")
    player.sessions.finish(judged.id, None, "ok")
    player.sessions.finish(failed.id, None, "infra_error", "a tool is gone")
    player.sessions.remove(deleted.id)
    answers = step_until(player, 4)
    assert [(a.reward, a.verdict) for a in answers] == [(0.5, "ok"), (None, "ok"), (None, "infra_error"), (None, "no_verdict")]
    assert all(len(a.trajectory.turns) == 2 for a in answers) and answers[1].text == judged.last_answer
    assert player.num_unfinished == len(player.sessions) == 0 and not player.offers.deadlines
    player.close()


def test_an_episode_ends_in_time_and_one_without_a_turn_is_offered_again() -> None:
    player = make_player(timeout_s=0.2)
    add(player, 0)
    session, _ = player.offers.take()
    player.sessions.remove(session.id)
    player.step()
    again, _ = player.offers.take()
    assert (again.group, again.sample) == (7, 0) and again.id != session.id
    ask(player, again)
    (answer,) = step_until(player, 1)
    assert answer.verdict == "timeout"
    add(player, 1)
    with pytest.raises(RuntimeError, match=f"group 7 sample 1: {MAX_STARTS} episodes ended before their first turn: verdict no_verdict"):
        for _ in range(MAX_STARTS):
            player.sessions.remove(player.offers.take()[0].id)
            player.step()
    player.close()


def test_an_agent_beside_the_engine_hands_out_nothing_and_has_no_address_unless_served(capsys: pytest.CaptureFixture) -> None:
    async def agent(session: AgentSession, prompt: list[dict], metadata: dict) -> None:
        await session.chat(prompt)
        assert session.base_url

    player = Player(make_engine(), PARAMS, agent, RENDERER, max_context=400, max_turns=2, timeout_s=20.0)
    with pytest.raises(SessionError, match="start it with --agent http") as error:
        player.episodes.take()
    assert error.value.status == 409
    add(player, 0)
    (answer,) = step_until(player, 1)
    assert answer.verdict == "infra_error" and "give --serve-port" in capsys.readouterr().err
    player.serve("127.0.0.1", 0, model="policy", token=None)
    add(player, 1)
    (answer,) = step_until(player, 1)
    assert answer.verdict == "ok"
    player.close()


def test_a_run_whose_episodes_nobody_takes_says_how_to_start_a_harness() -> None:
    player = make_player(nobody_s=0.0)
    url = player.serve("127.0.0.1", 0, model="policy", token=None)
    player.step()
    add(player, 0)
    with pytest.raises(ValueError, match=f"1 episodes wait, .* python -m miles_core.tito.harness --url {url} --agent module:function"):
        step_until(player, 1)
    player.close()
    with pytest.raises(ValueError, match="what the task's reward needs of group 7 is no JSON"):
        player.offers.start(7, 0, list(QUESTION), object())


def test_a_harness_is_sent_to_the_rank_with_the_most_episodes() -> None:
    ring = Ring.create(num_slots=2, slot_bytes=4096, window=1, num_rollout_ranks=3, num_groups=9)
    player = make_player()
    player.offers.share(ring, 1)
    ring.set_episodes(2, 2, 0, 0)
    add(player, 0)
    with pytest.raises(Elsewhere) as error:
        player.offers.take()
    assert (error.value.status, error.value.ranks) == (307, 1)
    add(player, 1)
    assert ring.episodes() == [[0, 2, 2], [0, 0, 0], [0, 0, 0]]
    player.offers.take()  # as many as elsewhere: it stays
    assert ring.episodes() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]
    player.offers.end_evaluation()
    assert player.offers.evaluating()
    for rank in (0, 2):
        ring.set_episodes(rank, 0, 0, 1)
    assert not player.offers.evaluating()
    player.close()
