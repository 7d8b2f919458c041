"""The OpenAI-compatible endpoint of a rank: every session is a base URL of its own.

    app = make_app(Sessions(renderer, backend, max_context=4096), defaults, model="policy")
    server = await serve(app, "127.0.0.1", 8000)                 # serve.py

    POST   /sessions                             {"group": 7, "sample": 0}, both optional -> {"id", "base_url", "budget_left", "turns_left"}
                                                 with --agent http: the next episode, with "prompt", "metadata", "timeout" (offers.py)
    GET    /sessions/{id}                        the tree of turns
    POST   /sessions/{id}/v1/chat/completions    plain or streamed; fields: chat_request.py
    GET    /sessions/{id}/v1/models
    POST   /sessions/{id}/finish                 {"reward": 1.0, "verdict": "ok", "detail": "..."}; all optional where a task can judge
    DELETE /sessions/{id}
    GET    /health, /metrics                     for people and Prometheus

Errors are {"error": {"message", "type", "code", "param"}} with the status of a SessionError. A refused request changes nothing.
With a token, everything but /health wants it as a bearer. Without, only names of this machine are answered to: else a web page that
points a name of its own at the loopback address could use the endpoint (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from miles_core.tito import stream
from miles_core.tito.backend import Piece
from miles_core.tito.chat_request import ChatRequest, read_chat, read_json
from miles_core.tito.errors import Elsewhere, SessionError
from miles_core.tito.parsers import StreamParser
from miles_core.tito.session import Opening, Reply, Session
from miles_core.tito.sessions import Sessions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from miles_core.engine.sequence import SamplingParams
    from miles_core.tito.tree import Node

LOOPBACK = ("127.0.0.1", "localhost", "::1")
IGNORED = "x-ignored-fields"  # header: fields of the request that had no effect
_READ_ANYWAY = 64 << 20  # bytes of a body that is too large: most clients listen only after they have sent it
_MOST_DETAIL = 10_000  # characters
_SEND_S = 60.0  # a client that takes nothing for so long is gone

TakeEpisode = Callable[[], tuple[Session, dict[str, Any]]]


def make_app(
    sessions: Sessions, defaults: SamplingParams, *, model: str, token: str | None = None, pinned: bool = False, max_body: int = 8 << 20,
    take: TakeEpisode | None = None,
) -> Starlette:  # fmt: skip
    """The application. `defaults`: what requests do not say; `pinned`: see read_chat. `max_body`: bytes of a request.

    `take`: where sessions come from: the next episode of a run, and what else its harness is told. None: anybody may open one.
    """
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise ValueError("the bearer token must have at least 8 printable ASCII characters")
    api = _Api(sessions, defaults, model, pinned, max_body, take)
    at = "/sessions/{id}"
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/sessions", api.open, methods=["POST"]),
        Route(at, api.show),
        Route(at, api.delete, methods=["DELETE"]),
        Route(at + "/finish", api.finish, methods=["POST"]),
        Route(at + "/v1/models", api.models),
        Route(at + "/v1/chat/completions", api.chat, methods=["POST"]),
    ]
    handlers = {SessionError: _refuse, HTTPException: _refuse_http, Exception: _broken, ClientDisconnect: _gone}
    middleware = [Middleware(_Guard, token=token, count=api.count_request)]
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.state.sessions, app.state.token = sessions, token
    return app


class _Api:
    """The endpoints."""

    def __init__(
        self, sessions: Sessions, defaults: SamplingParams, model: str, pinned: bool, max_body: int, take: TakeEpisode | None
    ) -> None:
        self.sessions, self.defaults, self.model, self.pinned, self.max_body = sessions, defaults, model, pinned, max_body
        self.take = take

    def count_request(self, status: int) -> None:
        self.sessions.counts[f'miles_requests_total{{status="{status}"}}'] += 1

    async def health(self, request: Request) -> Response:
        load = self.sessions.backend.load
        return JSONResponse({"status": "ok", "model": self.model, "sessions": len(self.sessions), "turns_in_flight": load})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.sessions.metrics(), media_type="text/plain; version=0.0.4")

    async def open(self, request: Request) -> Response:
        given = await self._json(request)
        session, more = self._new(given) if self.take is None else self.take()
        url = str(request.base_url) + f"sessions/{session.id}/v1"
        left = {"budget_left": session.budget_left, "turns_left": session.turns_left}
        made = {"id": session.id, "base_url": url, "group": session.group, "sample": session.sample, **left, **more}
        return JSONResponse(made, 201, headers=_ignored(given))

    def _new(self, given: dict[str, Any]) -> tuple[Session, dict[str, Any]]:
        group, sample = given.pop("group", None), given.pop("sample", 0)
        for name, value in (("group", group or 0), ("sample", sample)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
                raise SessionError(400, f"{name} must be a whole number >= 0")
        return self.sessions.open(group, sample), {}

    async def show(self, request: Request) -> Response:
        return JSONResponse(describe(self._session(request)))

    async def delete(self, request: Request) -> Response:
        self.sessions.remove(request.path_params["id"])
        return Response(status_code=204)

    async def finish(self, request: Request) -> Response:
        given = await self._json(request)
        reward, verdict, detail = given.pop("reward", None), given.pop("verdict", "ok"), str(given.pop("detail", ""))
        session = self.sessions.finish(request.path_params["id"], reward, verdict, detail[:_MOST_DETAIL])
        return JSONResponse({"id": session.id, "reward": session.reward, "verdict": session.verdict}, headers=_ignored(given))

    async def models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "miles"}]})

    async def chat(self, request: Request) -> Response | _Answering:
        session = self._session(request)
        wanted = read_chat(await self._body(request), self.defaults, pinned=self.pinned)
        answer = _Answering(self, session, wanted)
        if wanted.stream:
            return answer
        reply = await _unless_gone(request.receive, answer.ask())
        if reply is None:
            return Response(status_code=499)  # nobody reads it; the number is nginx's, for the metrics
        return JSONResponse(answer.whole(reply), headers=answer.headers)

    def _session(self, request: Request) -> Session:
        return self.sessions.get(request.path_params["id"])

    async def _json(self, request: Request) -> dict[str, Any]:
        return read_json(await self._body(request))

    async def _body(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self.max_body:
                chunks.append(chunk)
            elif size > _READ_ANYWAY:
                break
        if size > self.max_body:
            raise SessionError(413, f"the body has more than {self.max_body} bytes", "body_too_large")
        return b"".join(chunks)


class _Answering:
    """A turn for a client. As an ASGI application it streams; its status is known when the first token is, or an error."""

    def __init__(self, api: _Api, session: Session, wanted: ChatRequest) -> None:
        self._api, self._session, self._wanted = api, session, wanted
        self._answer = stream.Answer(f"chatcmpl-{session.id}-{len(session.tree.nodes)}", api.model)
        self._text: stream.TurnText | None = None
        self._put: Callable[[bytes], Awaitable[None]] | None = None
        self._started = False
        self.headers = _ignored(wanted.ignored)

    async def ask(self) -> Reply:
        """Have the session make the turn."""
        wanted = self._wanted
        reply = await self._session.chat(
            wanted.messages,
            tools=wanted.tools,
            tool_choice=wanted.tool_choice,
            params=wanted.params,
            template_kwargs=wanted.template_kwargs,
            top_logprobs=wanted.top_logprobs,
            seed=wanted.seed,
            on_opening=self._begin if wanted.stream else None,
            on_piece=self._pass_on if wanted.stream else None,
        )
        self._api.sessions.count_turn(reply)
        return reply

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The answer when it is not streamed."""
        entries = [self._logprobs(piece) for piece in reply.pieces] if self._wanted.logprobs else []
        logprobs = {"content": [entry for part in entries for entry in part["content"]], "refusal": None} if entries else None
        return self._answer.whole(reply, logprobs, **self._left())

    def _left(self) -> dict[str, int | None]:
        return {"budget_left": self._session.budget_left, "turns_left": self._session.turns_left}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            if not self._started:
                self._started = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self.headers}
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
            try:
                async with asyncio.timeout(_SEND_S):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError as error:
                raise ClientDisconnect from error

        async def answer() -> None:
            await self._stream(put)
            await put(b"", more=False)

        self._put = put
        await _unless_gone(receive, answer())

    async def _stream(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        try:
            reply = await self.ask()
        except SessionError as error:
            if not self._started:
                raise  # the status can still say it
            await put(stream.event(_error(error.status, error.message, error.code)))
            return
        assert self._text is not None
        rest = self._text.rest(reply.message)
        role = {} if self._started else {"role": "assistant"}
        await put(self._answer.chunk(role | rest, None, reply.finish, **self._left()))
        if self._wanted.include_usage:
            await put(self._answer.usage_chunk(reply))
        await put(stream.DONE)

    def _begin(self, opening: Opening) -> None:
        parser = StreamParser(opening.family, tools=self._wanted.tools, calls=opening.calls, thinking=opening.thinking)
        self._text = stream.TurnText(self._session.renderer.answer, parser, self._wanted.params.stop_strings, opening.text)

    async def _pass_on(self, piece: Piece) -> None:
        assert self._text is not None and self._put is not None
        delta: dict[str, Any] = self._text.push(piece.tokens)
        if not self._started:
            delta = {"role": "assistant", "content": ""} | delta
        logprobs = self._logprobs(piece) if self._wanted.logprobs else None
        if delta or logprobs:
            await self._put(self._answer.chunk(delta, logprobs))

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return stream.logprobs(piece, self._session.renderer.encoder.decode)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Reply | None]) -> Reply | None:
    """The result of `work`; None if the client goes first: then the work is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return None
    finally:
        task.cancel()
        watch.cancel()


class _Guard:
    """Lets in who may come in, and counts what they got."""

    def __init__(self, app: ASGIApp, token: str | None, count: Callable[[int], None]) -> None:
        self._app, self._count = app, count
        self._bearer = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
            await send(message)

        refusal = None if scope["path"] == "/health" else self._refusal(Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _refusal(self, headers: Headers) -> Response | None:
        if self._bearer is not None:
            if hmac.compare_digest(headers.get("authorization", "").encode(), self._bearer):
                return None
            text = "a bearer token is required: Authorization: Bearer ..."
            return JSONResponse(_error(401, text, "invalid_api_key"), 401, headers={"www-authenticate": "Bearer"})
        if urlsplit(f"//{headers.get('host', '')}").hostname in LOOPBACK:
            return None
        return JSONResponse(_error(403, "without a token, only requests to a name of this machine are answered", "forbidden"), 403)


def describe(session: Session) -> dict[str, Any]:
    """A session and its tree, for people and tests; tokens only by number."""
    return {
        "id": session.id,
        "group": session.group,
        "sample": session.sample,
        "reward": session.reward,
        "verdict": session.verdict,
        "turns_in_flight": session.in_flight,
        "budget_left": session.budget_left,
        "turns_left": session.turns_left,
        "nodes": [_describe_node(node) for node in session.tree.nodes[1:]],
    }


def _describe_node(node: Node) -> dict[str, Any]:
    assert node.parent is not None
    return {
        "number": node.number,
        "parent": node.parent.number,
        "messages": node.messages,
        "finish": node.finish,
        "prompt_tokens": len(node.prompt),
        "sampled_tokens": len(node.sampled),
        "tokens_to_here": node.num_tokens,
        "cached_tokens": node.cached,
        "versions": np.unique(node.version).tolist(),
    }


def _ignored(names: Iterable[str]) -> dict[str, str]:
    """The header that names fields without effect; percent-encoded, because clients choose the names."""
    listed = ", ".join(quote(name[:64], safe="") for name in names)
    return {IGNORED: listed[:2000]} if listed else {}


def _error(status: int, message: str, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, SessionError)
    # The openai client would ask 409 again by itself, with no better luck.
    headers = {"x-should-retry": "false"} if error.status == 409 else {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Elsewhere):
        headers["location"] = str(request.url.replace(port=(request.url.port or 80) + error.ranks))
    return JSONResponse(_error(error.status, error.message, error.code), error.status, headers=headers)


def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", None), error.status_code)


def _broken(request: Request, error: Exception) -> Response:
    """Ours to mend; uvicorn logs the traceback."""
    return JSONResponse(_error(500, f"{type(error).__name__} in the server; its log has the traceback", "internal_error"), 500)


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
