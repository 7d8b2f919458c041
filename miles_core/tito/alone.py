"""A checkpoint alone, over HTTP: `python rollout.py --serve`."""

from __future__ import annotations

import time

from miles_core.engine.engine import Engine, SamplingParams
from miles_core.tito.engine_backend import EngineBackend
from miles_core.tito.loop import Loop
from miles_core.tito.render import Renderer
from miles_core.tito.serve import serve
from miles_core.tito.server import make_app
from miles_core.tito.sessions import Sessions

IDLE_S = 0.0005


def serve_alone(
    engine: Engine, renderer: Renderer, params: SamplingParams, host: str, port: int, max_context: int, *, model: str, token: str | None
) -> None:  # fmt: skip
    """Until Ctrl-C or SIGTERM. ValueError (serve.py)."""
    backend = EngineBackend(engine)
    sessions, loop = Sessions(renderer, backend, max_context=max_context), Loop()
    server = loop.run(serve(make_app(sessions, params, model=model, token=token), host, port))
    print(f"serving {model} at {server.url}: POST {server.url}/sessions for a base URL", flush=True)
    try:
        while True:
            loop.poll()
            server.check()
            backend.pump()
            for completion in engine.step():
                backend.finish(completion)
            if not engine.num_unfinished:
                time.sleep(IDLE_S)
    finally:
        loop.run(server.stop())
        loop.close()
