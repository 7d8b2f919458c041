"""Runs the endpoint in a thread with an event loop of its own: the engine has the main thread.

with serve(make_app(...), "127.0.0.1", 8000) as server:
    print(server.url)
    ... run the engine ...
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette

_DRAIN_S = 2  # requests that are being answered get so long to end
_KEEP_ALIVE_S = 75  # agents run tools between their requests


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """A running endpoint: `host`, `port` (the one chosen, if 0 was asked for), `url`, `loop`."""

    def __init__(self, app: Starlette, listener: socket.socket, deadline_s: float) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self.url = f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"
        self._app = app
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self._server = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(listener,), name=f"serve-{self.port}", daemon=True)
        self._thread.start()
        until = time.monotonic() + deadline_s
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the server on port {self.port} did not start") from self._error
            if time.monotonic() > until:
                self.loop.call_soon_threadsafe(self._cancel_all)
                raise RuntimeError(f"the server on port {self.port} did not start within {deadline_s} s")
            time.sleep(0.002)

    def check(self) -> None:
        """RuntimeError if the thread has ended by an error: to be asked now and then by whoever relies on the server."""
        if self._error is not None:
            raise RuntimeError(f"the server on port {self.port} failed") from self._error

    def stop(self, deadline_s: float = 10.0) -> None:
        """Cancel turns, end sessions, close the port. RuntimeError if the thread does not end, or ended by an error. Again is fine."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._app.state.sessions.close)
            self._server.should_exit = True
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                self.loop.call_soon_threadsafe(self._cancel_all)
                raise RuntimeError(f"the server on port {self.port} did not stop within {deadline_s} s")
        self.check()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self, listener: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._server.serve([listener]))
        except BaseException as error:  # raised again by whoever starts or stops the server
            self._error = error
        finally:
            listener.close()


def serve(app: Starlette, host: str = "127.0.0.1", port: int = 0, *, deadline_s: float = 10.0) -> Server:
    """Start the endpoint of `server.make_app`; it answers when this returns. Port 0: any free one.

    ValueError for a port that cannot be had, and for an address that others can reach when the application has no token.
    """
    if not is_loopback(host) and app.state.token is None:
        raise ValueError(f"--serve-host {host} can be reached from other machines: a bearer token is required")
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
    return Server(app, listener, deadline_s)
