"""Rewards in killable child processes, each sample with a deadline and a verdict (DESIGN 4.9).

    pool = RewardPool("sort", seed=0)
    pool.submit(id, answer, text)            # queues
    pool.poll()                              # never waits -> [(id, reward, verdict, detail)]
    pool.close()

Verdicts: `ok`; `timeout`: the process was killed with its process group, and a new one started; `infra_error`: the reward raised, or its
process died; `no_verdict`: what it returned is no finite number. Only the reward of an `ok` means anything.

Children are persistent processes (`worker.py`) that do not import torch. What a reward itself has started dies with its worker, on a
timeout and on close, also what has left its process group. A worker may allocate `memory_gib`: a reward that wants more raises MemoryError.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.guard import kill_tree

START_TIMEOUT_S = 60.0  # for a worker to import and load its task
MAX_FAILURES = 16  # results in a row that are not ok, before the reward itself is called broken
_MAX_INFLIGHT = 32  # samples handed to a worker ahead of time: enough for one read and one write a step, few enough to share among workers
_READ_BYTES = 1 << 16
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Sample:
    id: Any
    answer: Any
    text: str


class RewardPool:
    """`num_workers` reward processes of one task, each of at most `memory_gib`. `task` to `eval_data` are the arguments of `tasks.load`."""

    def __init__(
        self, task: str, seed: int, data: str = "", eval_data: str = "", num_workers: int = 1, timeout_s: float = 10.0,
        memory_gib: float = 8.0,
    ):  # fmt: skip
        self.task, self.timeout_s = task, timeout_s
        self._arguments = [str(int(memory_gib * 2**30)), task, str(seed), data or "", eval_data or ""]
        self._queue: deque[_Sample] = deque()
        self._num_failures, self._first_error = 0, ""
        self._workers = [_Worker(self._arguments) for _ in range(num_workers)]

    @property
    def num_pending(self) -> int:
        """Samples submitted whose result `poll` has not returned yet."""
        return len(self._queue) + sum(len(worker.inflight) for worker in self._workers)

    def submit(self, id: Any, answer: Any, text: str) -> None:
        """Queue one completion. `id` comes back with its result; `answer` must be JSON-able."""
        self._queue.append(_Sample(id, answer, text))

    def poll(self) -> list[tuple[Any, float, str, str]]:
        """Hand out queued samples and collect what is finished: [(id, reward, verdict, detail)], in no particular order. Never waits.

        Raises ValueError when the task does not load in its process, and when MAX_FAILURES results in a row are not `ok`.
        """
        results = []
        for index, worker in enumerate(self._workers):
            results += worker.receive()
            if worker.closed or worker.is_late(self.timeout_s):
                self._workers[index] = self._replace(worker, results)
        self._dispatch()
        for _, _, verdict, detail in results:
            self._count(verdict, detail)
        return results

    def _replace(self, worker: _Worker, results: list[tuple[Any, float, str, str]]) -> _Worker:
        """A new worker for one that hangs or has died: its oldest sample gets the verdict, the others are queued again in front."""
        ending = worker.kill()
        if worker.closed:
            verdict, detail = "infra_error", f"the reward process died ({ending})"
        else:
            verdict, detail = "timeout", f"no answer within {self.timeout_s if worker.ready else START_TIMEOUT_S:g} s"
        if not worker.ready:
            raise ValueError(f"--task {self.task}: its reward process does not start: {worker.load_error or detail}")
        if worker.inflight:  # else it died idle: nobody's fault, and nothing is lost
            results.append((worker.inflight.popleft().id, 0.0, verdict, detail))
        self._queue.extendleft(reversed(worker.inflight))
        return _Worker(self._arguments)

    def _dispatch(self) -> None:
        share = math.ceil(self.num_pending / len(self._workers))
        for worker in self._workers:
            room = min(share, _MAX_INFLIGHT) - len(worker.inflight)
            if worker.ready and room > 0:
                worker.add([self._queue.popleft() for _ in range(min(room, len(self._queue)))])
            worker.send()

    def _count(self, verdict: str, detail: str) -> None:
        if verdict == "ok":
            self._num_failures = 0
            return
        if self._num_failures == 0:
            self._first_error = f"{verdict} ({detail})"
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise ValueError(
                f"--task {self.task}: {MAX_FAILURES} rewards in a row failed, first with {self._first_error}; fix its reward function"
                + (f", or raise --reward-timeout {self.timeout_s:g}" if verdict == "timeout" else "")
            )

    def close(self) -> None:
        """Kill every worker with its process group. Results not polled are lost."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _Worker:
    """One child process, and the samples that were handed to it, oldest first. It works on them in that order."""

    def __init__(self, arguments: list[str]):
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "miles_core.tasks.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a process group of its own, to be killed whole; Ctrl-C reaches it through us
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self.inflight: deque[_Sample] = deque()
        self.ready, self.closed, self.load_error = False, False, ""
        self._unsent, self._received = bytearray(), bytearray()
        self._busy_since = time.monotonic()  # when it began its start-up, or its oldest sample

    def add(self, samples: list[_Sample]) -> None:
        if not self.inflight:
            self._busy_since = time.monotonic()
        for sample in samples:
            self._unsent += json.dumps({"answer": sample.answer, "text": sample.text}).encode() + b"\n"
            self.inflight.append(sample)

    def send(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass  # the pipe is full; the rest goes with the next poll
        except BrokenPipeError:
            self._unsent.clear()  # it has died; what it still said, and then its end, are read by `receive`

    def receive(self) -> list[tuple[Any, float, str, str]]:
        """Results that have arrived."""
        while not self.closed:
            try:
                data = os.read(self._out, _READ_BYTES)
            except BlockingIOError:
                break
            self._received += data
            self.closed = not data
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return [result for line in lines if (result := self._parse(json.loads(line)))]

    def _parse(self, reply: dict) -> tuple[Any, float, str, str] | None:
        self._busy_since = time.monotonic()
        if "verdict" not in reply:
            self.ready, self.load_error = reply.get("ready", False), reply.get("error", "")
            return None
        return self.inflight.popleft().id, reply["reward"], reply["verdict"], reply["detail"]

    def is_late(self, timeout_s: float) -> bool:
        """True when its start-up, or its oldest sample, is past the deadline."""
        if not self.ready:
            return time.monotonic() - self._busy_since > START_TIMEOUT_S
        return bool(self.inflight) and time.monotonic() - self._busy_since > timeout_s

    def kill(self) -> str:
        """Kill the process with its group, and return how it ended: by its own doing if it was dead already. A second call does nothing."""
        if self.process.returncode is None:
            self._kill()
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.closed:
            self._has_ended(5.0)  # a dying process closes its pipe a moment before it ends
        self.process.stdin.close()  # its watcher kills it and what it started, as it would if this process died: now it may
        if not self._has_ended(10.0):  # it has no watcher any more
            self.process.send_signal(signal.SIGSTOP)
            kill_tree(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)  # whether it still runs or not: what it started may
        self.process.wait(timeout=10.0)
        self.process.stdout.close()

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether it ends within so long. WNOWAIT leaves it a zombie, so that the number of its group stays its own."""
        deadline = time.monotonic() + timeout_s
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
