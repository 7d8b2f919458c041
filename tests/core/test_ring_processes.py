"""The ring between real processes: many writers and readers, SIGKILL anywhere, the lock.

Run: python -m pytest tests/core/test_ring_processes.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from samples import trajectory
from test_ring import assert_equal, make

from miles_core import ring as ring_module
from miles_core.ring import Ring
from miles_core.schema import Trajectory

processes = multiprocessing.get_context("forkserver")  # children without our rings, locks and threads, yet quick to start
processes.set_forkserver_preload(["torch", "miles_core.ring"])


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Starts child processes, and ends them with the test."""
    children: list[BaseProcess] = []

    def start(target: Callable, *args: object) -> BaseProcess:
        child = processes.Process(target=target, args=args, daemon=True)
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


def contents(number: int) -> list[Trajectory]:
    """What group `number` must hold, whoever made it: about 16 KB."""
    return [trajectory(300 + number % 7, 600, group=number, sample=i) for i in range(2)]


def write_groups(path: str, rank: int, pause_s: float) -> None:
    """A rollout rank: claims, 'generates' for up to `pause_s`, puts, until it is told to stop."""
    ring, random = Ring.attach(path), np.random.default_rng(os.getpid())
    open_claims = []
    while ring.stopped_at is None:
        if len(open_claims) < 2 and (claim := ring.claim(rank)) is not None:
            open_claims.append(claim)
        elif open_claims:
            time.sleep(random.uniform(0, pause_s))
            claim = open_claims.pop(random.integers(0, len(open_claims)))
            ring.put(claim, contents(claim.group))
        else:
            time.sleep(0.0005)


def read_groups(path: str, pipe: Connection) -> None:
    """A training rank that is not the leader: reads what it gets references to, and answers with the groups it found."""
    ring = Ring.attach(path)
    while refs := pipe.recv():
        for ref in refs:
            assert_equal(contents(ref.group), ring.read(ref))
        pipe.send([ref.group for ref in refs])


def train_until(ring: Ring, num_groups: int, pipes: list[Connection], between_steps: Callable[[], None] = lambda: None) -> list[int]:
    """The training leader: takes two groups a step until `num_groups` are consumed. Returns them in the order taken."""
    taken: list[int] = []
    while len(taken) < num_groups:
        between_steps()
        refs = ring.take(2)
        for pipe in pipes:
            pipe.send(refs)
        for ref in refs:
            assert_equal(contents(ref.group), ring.read(ref))
        for pipe in pipes:
            assert pipe.recv() == [ref.group for ref in refs]
        ring.release(refs, 0)
        taken += [ref.group for ref in refs]
    return taken


def ring_of(num_slots: int, num_groups: int, num_rollout_ranks: int = 3) -> Ring:
    return make(num_slots, window=3, slot_bytes=65536, num_rollout_ranks=num_rollout_ranks, num_groups=num_groups, timeout_s=60.0)


def test_every_group_arrives_once_and_whole_at_every_reader(start: Callable[..., BaseProcess]) -> None:
    residue = set(os.listdir("/dev/shm"))
    ring, num_groups = ring_of(6, 80), 80
    ends = [processes.Pipe() for _ in range(2)]
    for _, theirs in ends:
        start(read_groups, ring.segment.path, theirs)
    for rank in range(3):
        start(write_groups, ring.segment.path, rank, 0.004)
    taken = train_until(ring, num_groups, [mine for mine, _ in ends])
    assert sorted(taken) == list(range(num_groups))
    assert max(abs(g - i) for i, g in enumerate(taken)) < ring.window, "in order, but for the window"
    assert ring.status().reclaimed == 0 and ring.claim(0) is None
    assert not [name for name in set(os.listdir("/dev/shm")) - residue if "miles" in name]


def test_writers_killed_at_random_cost_no_group_and_double_none(start: Callable[..., BaseProcess]) -> None:
    ring, num_groups, random = ring_of(6, 120), 120, np.random.default_rng(0)
    writers = [start(write_groups, ring.segment.path, rank, 0.01) for rank in range(3)]
    kills = 0

    def kill_one() -> None:
        nonlocal kills
        if random.random() < 0.4:
            time.sleep(random.uniform(0, 0.01))
            rank = int(random.integers(0, 3))
            writers[rank].kill()
            writers[rank] = start(write_groups, ring.segment.path, rank, 0.01)
            kills += 1

    taken = train_until(ring, num_groups, [], kill_one)
    assert sorted(taken) == list(range(num_groups))
    assert kills >= 10 and 1 <= ring.status().reclaimed <= 2 * kills, (kills, ring.status())


# ---- SIGKILL at every line of claim() and put() ------------------------------------------------------------------------------------


def die_at_line(path: str, number: int) -> None:
    """In a forked child: claim and put one group, but be killed before the `number`-th line of ring.py is run from here on."""
    ring, count = Ring.attach(path), 0

    def trace(frame: object, event: str, _: object) -> Callable | None:
        nonlocal count
        if frame.f_code.co_filename != ring_module.__file__:
            return None
        if event == "line":
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    claim = ring.claim(0)
    ring.put(claim, contents(claim.group))
    os._exit(0)


def die_with_a_claim(path: str) -> None:
    Ring.attach(path).claim(0)
    os.kill(os.getpid(), signal.SIGKILL)


def fork(target: Callable, *args: object) -> int:
    """Run `target` in a forked child to its end. Returns the wait status."""
    if (pid := os.fork()) == 0:
        try:
            target(*args)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("inherited", [False, True], ids=["new group", "taken over from a dead writer"])
def test_a_writer_killed_at_any_line_leaves_a_ring_that_goes_on(inherited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "_DEAD_CHECK_S", 0.0)
    ring = make(2, slot_bytes=65536, num_groups=10**6)
    line, reclaimed, finished = 0, 0, False
    while not finished:
        line += 1
        if inherited:
            fork(die_with_a_claim, ring.segment.path)
            assert ring.status().in_flight == 1
        status = fork(die_at_line, ring.segment.path, line)
        finished = status == 0
        assert finished or os.WTERMSIG(status) == signal.SIGKILL, status
        reclaimed += ring.status().in_flight
        first = 2 * (line - 1)
        while (claim := ring.claim(0)) is not None:
            ring.put(claim, contents(claim.group))
        refs = ring.take(2)
        assert [ref.group for ref in refs] == [first, first + 1], f"after a kill at line {line}"
        for ref in refs:
            assert_equal(contents(ref.group), ring.read(ref))
        ring.release(refs, 0)
    assert line > 50, "the trace saw the lines of claim and put"
    by_children = ring.status().reclaimed - reclaimed
    assert 0 < by_children < line if inherited else by_children == 0


# ---- the lock --------------------------------------------------------------------------------------------------------------------------


def hold_lock(path: str, pipe: Connection) -> None:
    ring = Ring.attach(path)
    with ring._lock():
        pipe.send("held")
        time.sleep(600)


def attach_and_leave(path: str) -> None:
    Ring.attach(path)


def try_lock(path: str, pipe: Connection) -> None:
    ring = Ring.attach(path)
    ring.timeout_s = 0.1
    try:
        with ring._lock():
            pipe.send("got it")
    except TimeoutError as error:
        pipe.send(str(error))


def test_a_held_lock_is_reported_with_its_holder_and_freed_by_sigkill(start: Callable[..., BaseProcess]) -> None:
    ring, (mine, theirs) = make(timeout_s=0.2), processes.Pipe()
    holder = start(hold_lock, ring.segment.path, theirs)
    assert mine.recv() == "held"
    with pytest.raises(TimeoutError, match=f"waited 0.2 s for the ring's lock: is process {holder.pid} stopped"):
        ring.claim(0)
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="for the ring's lock"):
        ring.ready(1)
    holder.kill()
    holder.join()
    assert ring.claim(0).group == 0


def test_a_lock_is_not_dropped_by_another_process_that_opens_and_closes_the_ring(start: Callable[..., BaseProcess]) -> None:
    ring, (mine, theirs) = make(), processes.Pipe()
    with ring._lock():
        child = start(attach_and_leave, ring.segment.path)
        child.join()
        assert child.exitcode == 0
        start(try_lock, ring.segment.path, theirs)
        assert mine.recv() == f"waited 0.1 s for the ring's lock: is process {os.getpid()} stopped?"
    start(try_lock, ring.segment.path, theirs)
    assert mine.recv() == "got it"


def count_under_lock(path: str, word: int, times: int) -> None:
    ring = Ring.attach(path)
    for _ in range(times):
        with ring._lock():
            value = int(ring.header[word])
            time.sleep(0)
            ring.header[word] = value + 1


def test_the_lock_keeps_processes_apart(start: Callable[..., BaseProcess]) -> None:
    ring, word, times = make(), 15, 1000
    children = [start(count_under_lock, ring.segment.path, word, times) for _ in range(3)]
    for child in children:
        child.join()
    assert ring.header[word] == 3 * times


def use_after_fork(ring: Ring) -> None:
    try:
        ring.claim(0)
    except AssertionError as error:
        os._exit(0 if "does not survive a fork" in str(error) else 2)


def test_a_forked_child_must_attach_for_itself() -> None:
    assert fork(use_after_fork, make()) == 0
