"""A reward process: reads samples as JSON lines on stdin, writes verdicts as JSON lines on stdout. Started by `rewards.RewardPool`.

    python -m miles_core.tasks.worker MEMORY_BYTES TASK SEED DATA EVAL_DATA

First line out: {"ready": true}, or {"error": sentence} if the task does not load. Then, for every line in {"answer", "text"}, one line
out, in the same order: {"reward", "verdict", "detail"}. It ends with its stdin, and when its parent dies, with every process that it or a
reward has started, whatever group or session that has gone to.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from miles_core import tasks
from miles_core.guard import adopt_orphans, kill_tree


def judge(task: tasks.Task, answer: Any, text: str) -> tuple[float, str, str]:
    """(reward, verdict, detail) of one completion. The reward is 0.0 and means nothing unless the verdict is `ok`."""
    try:
        value = task.reward(answer, text)
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except Exception as error:
        return 0.0, "infra_error", first_line(f"{type(error).__name__}: {error}")
    if not math.isfinite(number):
        return 0.0, "no_verdict", first_line(f"the reward is {value!r}, not a finite number")
    return number, "ok", ""


def first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def end_with_stdin() -> None:
    """Fork a watcher that kills this process and all that it started when nobody holds the other end of stdin any more.

    Then the parent has died, or gives this worker up. The kernel's parent-death signal would end the worker alone, and leave behind what a
    reward has started.
    """
    worker = os.getpid()
    if os.fork() == 0:
        os.setsid()  # out of the group, which is killed when the parent gives this worker up
        os.close(1)  # else the parent would not see the worker's end
        poll = select.poll()
        poll.register(0, 0)  # no event asked for: a hang-up is always told, and requests are left for the worker
        poll.poll()
        if os.getppid() == worker:  # else it has ended by itself, and its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGSTOP)  # it starts nothing more
                kill_tree(worker, but=os.getpid())
                os.kill(worker, signal.SIGKILL)
        os._exit(0)


def main(memory: str, name: str, seed: str, data: str, eval_data: str) -> None:
    adopt_orphans()
    end_with_stdin()
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))  # of each process: a reward that wants more gets a MemoryError
    # Reward code may print and read: it gets stderr and /dev/null, and never sees the descriptors of the protocol.
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        task = tasks.load(name, int(seed), data, eval_data)
    except ValueError as error:
        print(json.dumps({"error": first_line(str(error))}), file=replies, flush=True)
        return
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        sample = json.loads(line)
        reward, verdict, detail = judge(task, sample["answer"], sample["text"])
        try:
            print(json.dumps({"reward": reward, "verdict": verdict, "detail": detail}), file=replies, flush=True)
        except BrokenPipeError:
            break
    # The rank has died, or gives this process up: the watcher is about to kill it, with what it has started, which is found while it lives.
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
