"""What tests of the endpoint share: a tokenizer, a backend that says what a script wrote, and a running server.

The backend stands for the engine and is the only fake. Legend: T tokens of a prompt, M sampled tokens.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
from starlette.applications import Starlette
from tito_models import model_dir, sampling

from miles_core.model import hf
from miles_core.tito.backend import Piece, TurnRequest, TurnResult
from miles_core.tito.loop import Loop
from miles_core.tito.render import Renderer
from miles_core.tito.serve import Server, serve
from miles_core.tito.server import make_app
from miles_core.tito.sessions import Sessions

MAX_CONTEXT = 20_000
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}},
    }
]


def thinking_tokenizer() -> hf.Tokenizer:
    """Qwen2.5's format, but enable_thinking has a prompt end in <think>. Characters beyond ASCII take several tokens."""
    tokenizer = hf.load_tokenizer(model_dir("chatml"))
    tokenizer.chat_template += "{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}"
    return tokenizer


class ScriptedTurn:
    """Says its tokens in pieces of `width`, each after `pause_s`. Ends at the limit, at a stop string, or with its tokens."""

    def __init__(self, backend: ScriptedBackend, request: TurnRequest, tokens: list[int]) -> None:
        self._backend, self._request, self._all = backend, request, tokens
        self._said: list[int] = []
        self._finish: str | None = None
        self._cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        backend, params = self._backend, self._request.params
        while self._finish is None:
            if backend.pause_s:
                await asyncio.wait([asyncio.ensure_future(self._cancelled.wait())], timeout=backend.pause_s)
            else:
                await asyncio.sleep(0)
            if self._cancelled.is_set():
                raise asyncio.CancelledError
            before = len(self._said)
            for token in self._all[before : before + backend.width]:
                self._said.append(token)
                text = backend.decode(self._said) if params.stop_strings else ""
                if len(self._said) == len(self._all) or any(stop in text for stop in params.stop_strings):
                    self._finish = "stop"
                elif len(self._said) >= params.max_new_tokens:
                    self._finish = "length"
                if self._finish:
                    break
            new = self._said[before:]
            tops = [[(token, logp_of(token)), (0, -math.inf)][: self._request.top_logprobs] for token in new]
            yield Piece(list(new), [logp_of(token) for token in new], tops)
        backend.running.discard(self)

    async def result(self) -> TurnResult:
        if self._finish is None:
            async for _ in self:
                pass
        said = self._said
        logp = np.array([logp_of(token) for token in said], np.float32)
        return TurnResult(np.array(said, np.int32), logp, np.full(len(said), 3, np.int32), self._finish, len(self._request.tokens) // 2)

    def cancel(self) -> None:
        if self._finish is None and not self._cancelled.is_set():
            self._cancelled.set()
            self._backend.num_cancelled += 1
            self._backend.running.discard(self)


def logp_of(token: int) -> float:
    return -0.5 - token / 512


class ScriptedBackend:
    """`script`: from a request to the text to say; the token that ends a turn is added."""

    max_context = MAX_CONTEXT

    def __init__(self, tokenizer: hf.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.script: Callable[[TurnRequest], str] = lambda request: "Hello"
        self.width, self.pause_s = 3, 0.0
        self.requests: list[TurnRequest] = []
        self.running: set[ScriptedTurn] = set()
        self.num_cancelled = 0

    def submit(self, request: TurnRequest) -> ScriptedTurn:
        self.requests.append(request)
        turn = ScriptedTurn(self, request, self._tokenizer.encode(self.script(request) + END, add_special_tokens=False))
        self.running.add(turn)
        return turn

    @property
    def load(self) -> int:
        return len(self.running)

    def decode(self, tokens: Any) -> str:
        return self._tokenizer.decode(tokens)


DEFAULTS = sampling(400)


class Endpoint:
    """A running server over a scripted backend. `options`: of Sessions and make_app."""

    def __init__(self, **options: Any) -> None:
        self.tokenizer = thinking_tokenizer()
        self.backend = ScriptedBackend(self.tokenizer)
        self.ended: list[Any] = []
        app_options = {name: options.pop(name) for name in ("token", "pinned", "max_body", "take") if name in options}
        options = {"max_context": MAX_CONTEXT, "on_end": self.ended.append, **options}
        self.sessions = Sessions(Renderer(self.tokenizer, "chatml"), self.backend, **options)
        self.loop = Loop()
        self._thread = threading.Thread(target=self.loop.events.run_forever, daemon=True)  # the tests' clients block
        self._thread.start()
        self.server = self.serve(make_app(self.sessions, DEFAULTS, model="policy", **app_options))
        key = app_options.get("token", "none")
        self.http = openai.DefaultHttpxClient(base_url=self.server.url, headers={"authorization": f"Bearer {key}"}, timeout=20)
        self._key = key

    def run(self, work: Coroutine) -> Any:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop.events).result(20)

    def serve(self, app: Starlette, **options: Any) -> Server:
        return self.run(serve(app, **options))

    def stop(self) -> None:
        self.run(self.server.stop())

    def close(self) -> None:
        self.http.close()
        self.stop()
        self.loop.events.call_soon_threadsafe(self.loop.events.stop)
        self._thread.join(20)
        self.loop.close()

    def open(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/sessions", json=body)
        assert response.status_code == 201, response.text
        return response.json()

    def client(self, session: dict[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(base_url=session["base_url"], api_key=self._key, timeout=20)

    def tree(self, session: dict[str, Any]) -> dict[str, Any]:
        return self.http.get(f"/sessions/{session['id']}").json()


@contextmanager
def running(**options: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(**options)
    try:
        yield endpoint
    finally:
        endpoint.close()
