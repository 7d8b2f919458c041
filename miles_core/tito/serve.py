"""Runs the endpoint on an event loop that others share: the engine's thread polls it (loop.py).

    server = await serve(make_app(...), "127.0.0.1", 8000)      # it answers whenever the loop runs
    server.check()                                              # now and then: has it failed?
    await server.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

_DRAIN_S = 2  # requests that are being answered get so long to end
_KEEP_ALIVE_S = 75  # agents run tools between their requests
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address that stands for all of this machine's -> one that a client can use


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C is for the run, which stops the server."""
        yield


class Server:
    """A running endpoint: `port` (the one chosen, if 0 was asked for), `url` for clients on this machine."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        host, self.port = listener.getsockname()[:2]
        host = _ANY.get(host, host)
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self._sessions = app.state.sessions
        config = uvicorn.Config(
            app,
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self._server = _Uvicorn(config)
        self._tasks = [asyncio.create_task(self._server.serve([listener])), asyncio.create_task(self._sessions.sweep())]

    def check(self) -> None:
        """RuntimeError if the server has ended by an error: to be asked now and then by whoever relies on it."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError(f"the server on port {self.port} failed") from task.exception()

    async def started(self, deadline_s: float) -> None:
        """Until it listens. RuntimeError at the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not self._server.started and not self._tasks[0].done():
                    await asyncio.sleep(0.001)
        self.check()
        if not self._server.started:
            raise RuntimeError(f"the server on port {self.port} did not start within {deadline_s} s")

    async def stop(self, deadline_s: float = 10.0) -> None:
        """Cancel turns, end sessions, close the port. RuntimeError if that takes too long. Again is fine."""
        serving, sweeping = self._tasks
        sweeping.cancel()
        self._sessions.close()
        self._server.should_exit = True
        await asyncio.wait([serving], timeout=deadline_s)
        if not serving.done():
            serving.cancel()
            raise RuntimeError(f"the server on port {self.port} did not stop within {deadline_s} s")


async def serve(app: Starlette, host: str = "127.0.0.1", port: int = 0, *, deadline_s: float = 10.0) -> Server:
    """Start the endpoint of `server.make_app` on the running loop. Port 0: any free one.

    ValueError for a port that cannot be had, and for an address that others can reach when the application has no token.
    """
    if not is_loopback(host) and app.state.token is None:
        raise ValueError(f"--serve-host {host} can be reached from other machines: a bearer token is required, in MILES_SERVE_TOKEN")
    if not 0 <= port < 65536:
        raise ValueError(f"--serve-port {port} must be from 0 to 65535")
    try:
        # The protocol matters: only sockets that name TCP get TCP_NODELAY from asyncio, and without it an answer takes 40 ms.
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--serve-host {host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"--serve-port {port} on {host} cannot be used: {error}") from error
    server = Server(app, listener)
    await server.started(deadline_s)
    return server
