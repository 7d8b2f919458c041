"""Run one function on several gloo ranks of this machine, with a deadline.

    from launcher import run_ranks
    def body(x):                              # top level of a module, so that a new process can import it
        dist.init_process_group("gloo")       # or Topology(...): RANK, WORLD_SIZE, MASTER_ADDR ... are set, as under torchrun
        return dist.get_rank() + x
    assert run_ranks(2, body, 10) == [10, 11]

Processes come from a fork server that imports torch once per test session, so a rank starts in milliseconds and still
inherits no thread, lock or process group from the test process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Each of these takes a second or so to import; FSDP imports torch._dynamo at its first use.
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch._dynamo", "numpy.random"]
_DIED = "died"
_GRACE_S = 1.0  # after a failure: time for the other ranks to fail too, before they are killed


def _child(rank: int, environment: dict[str, str], payload: bytes, result: Connection, stacks: str, timeout: float) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(max(timeout - 1.0, timeout / 2), file=file)
        try:
            function, args = pickle.loads(payload)
            # Pickled here, not by Connection.send: that would share tensors by file descriptors of a process about to end.
            message = (True, pickle.dumps(function(*args)))
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:
            message = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    result.send(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a failed rank's destructors may wait for lost peers


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(*args)` in `world_size` new processes -> their results in rank order.

    The environment is the caller's plus RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Function,
    arguments and results are pickled. Raises RuntimeError with the exit code of a rank that was killed, else with the traceback of
    the first that failed, and TimeoutError with the stacks of the unfinished ranks. No rank outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The store lives here, on a port that the kernel picked: no rank has to bind a port that was free a moment ago.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    payload = pickle.dumps((function, args))
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                parameters = (rank, environment, payload, theirs, f"{directory}/{rank}", timeout)
                processes.append(context.Process(target=_child, args=parameters, daemon=True))
                pipes.append(ours)
                processes[-1].start()
                theirs.close()  # the child holds the only writing end: its death reads as EOF
            return _collect(processes, pipes, Path(directory), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(processes: list, pipes: list[Connection], stacks: Path, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join(_GRACE_S)
                ok, value = False, f"{_DIED} with exit code {processes[rank].exitcode}"
            if ok:
                results[rank] = pickle.loads(value)
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        # A killed rank is the cause even when its peers were quicker to complain about it.
        first = min(failures, key=lambda rank: not failures[rank].startswith(_DIED))
        raise RuntimeError(f"rank {first} of {len(pipes)} failed first (failed: {sorted(failures)}):\n{failures[first]}")
    missing = [rank for rank in range(len(pipes)) if rank not in results]
    if missing:
        seen = "\n".join(f"rank {rank}:\n{(stacks / str(rank)).read_text() if (stacks / str(rank)).exists() else ''}" for rank in missing)
        raise TimeoutError(f"ranks {missing} of {len(pipes)} did not finish within {timeout:.0f} s; they were at\n{seen}")
    return [results[rank] for rank in range(len(pipes))]
