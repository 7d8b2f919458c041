"""What a request to the endpoint costs besides the engine.

    python tests/bench/bench_server.py [--turns 40] [--sessions 64]
    python tests/bench/bench_server.py --url http://127.0.0.1:8000           # all sessions at once of rollout.py --model tiny --serve

The backend says prepared tokens at once, so all that is measured is ours: HTTP, JSON, the tree, rendering, tokenising, parsing. One session
by plain HTTP, early and late turns; the same with the openai client (its own work on a long conversation is included); then all sessions at
once: busy time of the server's thread divided by requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/core")]

from tito_kit import running  # noqa: E402  # the path comes first

QUESTION = "The tool says: 17 files, 3 of them changed since yesterday. " * 5
ANSWER = "I look at the next one. " * 4


def episode(turns: int, ask: Callable[[list[dict[str, str]]], str]) -> list[float]:
    """Seconds of each turn."""
    messages, seconds = [{"role": "user", "content": QUESTION}], []
    for _ in range(turns):
        start = time.perf_counter()
        said = ask(messages)
        seconds.append(time.perf_counter() - start)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    return seconds


def say(name: str, seconds: list[float]) -> None:
    quarter = max(len(seconds) // 4, 1)
    early, late = statistics.median(seconds[:quarter]), statistics.median(seconds[-quarter:])
    print(f"{name:<28} p50 {statistics.median(seconds) * 1e3:6.2f} ms   first quarter {early * 1e3:6.2f}   last quarter {late * 1e3:6.2f}")


async def crowd(url: str, sessions: int, turns: int, question: str) -> int:
    """Returns how many tokens were sampled."""

    async def one(http: httpx2.AsyncClient) -> int:
        url = (await http.post("/sessions")).json()["base_url"] + "/chat/completions"
        messages, tokens = [{"role": "user", "content": question}], 0
        for _ in range(turns):
            answer = (await http.post(url, json={"messages": messages})).json()
            tokens += answer["usage"]["completion_tokens"]
            if answer["choices"][0]["finish_reason"] == "length":
                break
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        return tokens

    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        return sum(await asyncio.gather(*(one(http) for _ in range(sessions))))


def against(url: str, sessions: int, turns: int) -> None:
    """A server with an engine behind it."""
    for _ in range(3):
        start = time.perf_counter()
        tokens = asyncio.run(crowd(url, sessions, turns, "539214="))
        print(f"{sessions} sessions at once: {tokens / (time.perf_counter() - start):.0f} sampled tokens/s")


async def thread_seconds() -> float:
    return time.thread_time()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=40)
    arguments.add_argument("--sessions", type=int, default=64)
    arguments.add_argument("--url", default="")
    args = arguments.parse_args()
    if args.url:
        return against(args.url, args.sessions, 6)
    with running() as endpoint:
        endpoint.backend.script, endpoint.backend.width = (lambda request: ANSWER), 1000

        def plain(messages: list[dict[str, str]], url: str) -> str:
            return endpoint.http.post(url, json={"messages": messages}).json()["choices"][0]["message"]["content"]

        def by_client(messages: list[dict[str, str]], client: Any) -> str:
            return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

        for _ in range(2):  # the first round warms up
            url = endpoint.open()["base_url"] + "/chat/completions"
            client = endpoint.client(endpoint.open())
            by_http = episode(args.turns, lambda messages, url=url: plain(messages, url))
            by_openai = episode(args.turns, lambda messages, client=client: by_client(messages, client))
        say("plain HTTP", by_http)
        say("openai client", by_openai)
        busy = [endpoint.run(thread_seconds())]
        asyncio.run(crowd(endpoint.server.url, args.sessions, args.turns // 2, QUESTION))
        busy.append(endpoint.run(thread_seconds()))
        requests = args.sessions * (args.turns // 2 + 1)
        print(
            f"{args.sessions} sessions at once".ljust(28)
            + f" {(busy[1] - busy[0]) / requests * 1e3:10.2f} ms of the server's thread a request"
        )


if __name__ == "__main__":
    main()
