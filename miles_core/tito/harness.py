"""A harness: plays the episodes of a run in a process of its own, on any machine that reaches the run. No torch.

    launch/run.sh --task guess --agent http --serve-port 8000                                  the run
    python -m miles_core.tito.harness --url http://127.0.0.1:8000 --agent mine.py:run          its harness; any number of them, at any time

The agent is the same function as in the run's own process (agents.py); what it gets is a RemoteSession. A harness ends with the run, exit
code 0; or with 2 and one sentence when there is none, or it has no use for a harness. A run's token is read from MILES_SERVE_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from miles_core import guard
from miles_core.tito.agents import OVER, Agent, EpisodeOver, load_agent, play
from miles_core.tito.errors import SessionError

_ASK_AGAIN_S = 0.1  # after an answer that nothing waits
_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)  # a rank that trains too answers nobody meanwhile
_MOST_REDIRECTS = 8


@dataclass(frozen=True)
class RemoteReply:
    """`message`: the assistant's, in OpenAI form; send it back as it is. `finish`: "stop", "length" or "tool_calls"."""

    message: dict[str, Any]
    finish: str
    usage: dict[str, Any]


class RemoteSession:
    """What an agent sees, as AgentSession (episodes.py), over HTTP."""

    def __init__(self, http: httpx2.AsyncClient, made: dict[str, Any], api_key: str):
        self._http, self.api_key = http, api_key
        self.id, self.base_url, self.group, self.sample = (made[name] for name in ("id", "base_url", "group", "sample"))
        self.tokens_left, self.turns_left, self.shows_tools = made["budget_left"], made["turns_left"], made["shows_tools"]

    async def chat(
        self, messages: list[dict], *, tools: list[dict] | None = None, tool_choice: str = "auto",
        max_tokens: int | None = None, stop: tuple[str, ...] = (),
    ) -> RemoteReply:  # fmt: skip
        """The model's answer to the whole conversation so far. Append `reply.message` to it as it is."""
        body = {"messages": messages, "tools": tools, "tool_choice": tool_choice, "max_tokens": max_tokens, "stop": list(stop) or None}
        answer = await self._http.post(f"{self.base_url}/chat/completions", json=body)
        said = answer.json()
        if answer.status_code != 200:
            error = SessionError(answer.status_code, said["error"]["message"], said["error"]["code"])
            if error.code in OVER:
                raise EpisodeOver(error.message) from error
            raise error
        self.tokens_left, self.turns_left = said["budget_left"], said["turns_left"]
        (choice,) = said["choices"]
        message = {name: value for name, value in choice["message"].items() if name != "refusal"}
        return RemoteReply(message, choice["finish_reason"], said["usage"])


class Harness:
    """`concurrency`: episodes at once. `wait_s`: how long to try to reach the run at first. `token`: the run's, if it has one."""

    def __init__(self, url: str, agent: Agent, *, concurrency: int, wait_s: float, token: str | None):
        self.url, self.agent, self.concurrency, self.wait_s = url.rstrip("/"), agent, concurrency, wait_s
        self.api_key = token or "none"
        self.reached, self.ended, self.num_played = False, False, 0
        self.asking = asyncio.Lock()  # one request at a time, however many episodes we could take

    async def run(self) -> None:
        """Until the run ends. ValueError if there is none, or it hands out no episodes."""
        limits = httpx2.Limits(max_connections=self.concurrency + 1)
        headers = {"authorization": f"Bearer {self.api_key}"}
        async with httpx2.AsyncClient(timeout=_TIMEOUT, limits=limits, headers=headers) as self.http:
            await asyncio.gather(*(self._work() for _ in range(self.concurrency)))

    async def _work(self) -> None:
        while (made := await self._next()) is not None:
            await self._play(made)

    async def _next(self) -> dict[str, Any] | None:
        """What POST /sessions says about the next episode, whenever there is one; None when the run has ended."""
        deadline = time.monotonic() + self.wait_s
        async with self.asking:
            while not self.ended:
                try:
                    answer = await self._ask()
                except httpx2.TransportError as error:
                    self.ended = self.reached and isinstance(error, httpx2.ConnectError)
                    if not self.reached and time.monotonic() > deadline:
                        raise ValueError(f"--url {self.url} cannot be reached for {self.wait_s:g} s: {error}") from error
                else:
                    self.reached = True
                    if answer.status_code == 201:
                        return answer.json()
                    error = answer.json()["error"]
                    self.ended = error["code"] == "stopping"
                    if answer.status_code not in (307, 429, 503):
                        raise ValueError(f"--url {self.url} gives no episode: {error['message']}")
                await asyncio.sleep(_ASK_AGAIN_S)
        return None

    async def _ask(self) -> httpx2.Response:
        """Ask for an episode, also where we are sent: by hand, since clients drop the token on their way to another port."""
        url = f"{self.url}/sessions"
        for _ in range(_MOST_REDIRECTS):
            answer = await self.http.post(url)
            if answer.status_code != 307:
                break
            url = answer.headers["location"]
            if urlsplit(url).hostname != urlsplit(self.url).hostname:
                raise ValueError(f"--url {self.url} sends us to another machine, {url}: give the address of a rollout rank")
        return answer

    async def _play(self, made: dict[str, Any]) -> None:
        url = made["base_url"].removesuffix("/v1")
        session = RemoteSession(self.http, made, self.api_key)
        try:
            reward, verdict, detail = await play(self.agent, session, made["prompt"], made["metadata"], made["timeout"])
            ended = await self._finish(url, reward, verdict, detail)
            if ended.status_code == 400:  # no such verdict
                verdict, detail = "infra_error", ended.json()["error"]["message"]
                ended = await self._finish(url, None, verdict, detail)
        except asyncio.CancelledError:
            await self.http.delete(url)
            raise
        except httpx2.TransportError:
            return  # the run has ended, or gives the episode up in time
        if ended.status_code == 200:  # else it was over before
            self.num_played += 1
            if verdict != "ok":
                print(f"group {made['group']} sample {made['sample']}: {verdict}: {detail}", file=sys.stderr, flush=True)

    async def _finish(self, url: str, reward: float | None, verdict: str, detail: str) -> httpx2.Response:
        return await self.http.post(f"{url}/finish", json={"reward": reward, "verdict": verdict, "detail": detail})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m miles_core.tito.harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="of a rollout rank; it sends us on to the others of its node")
    parser.add_argument("--agent", required=True, help="module:function or file.py:function")
    parser.add_argument("--concurrency", type=int, default=8, help="episodes at once (default: 8)")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds to try to reach the run at first (default: 300)")
    args = parser.parse_args()
    if args.concurrency < 1:
        raise ValueError(f"--concurrency {args.concurrency} must be at least 1")
    token = os.environ.get("MILES_SERVE_TOKEN")
    harness = Harness(args.url, load_agent(args.agent), concurrency=args.concurrency, wait_s=args.wait, token=token)
    asyncio.run(harness.run())
    print(f"the run at {args.url} has ended; {harness.num_played} episodes were played here")


if __name__ == "__main__":
    guard.run(main)
