"""Reward processes: every verdict, deadlines that kill, nothing lost when a worker dies, and a broken reward stops the run in a sentence.

    python -m pytest tests/core/test_rewards.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_core.tasks import rewards
from miles_core.tasks.rewards import MAX_FAILURES, RewardPool

ROOT = Path(__file__).resolve().parents[2]
# The completion says what the reward does: a task to be judged by.
TASK = """
import os, subprocess, sys, time
from miles_core.tasks import Task

def hang(answer):
    # all of these must die with the reward: a program, one in a session of its own, and an orphan of another one that has ended
    programs = [subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (False, True)]
    orphan = subprocess.run("setsid sleep 1000 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True).stdout
    open(answer, "w").write(f"{os.getpid()} {programs[0].pid} {programs[1].pid} {int(orphan)}")
    time.sleep(1000)

def bomb(answer):
    for _ in range(200):
        subprocess.Popen(["sh", "-c", f"echo $$ >> {answer}; sleep 1000 & setsid sh -c 'sleep 1000 & wait' & wait"])
    time.sleep(1000)

def leave(answer):
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(answer, "w").write(f"{os.getpid()} {program.pid}")
    return 1

def crash(answer):
    os.kill(os.getpid(), 9)

def noise(answer):
    print('{"reward": 7}', flush=True)
    os.system("echo noise; cat")  # cat would eat the requests
    return 0.25

def fail(answer):
    raise KeyError("first\\nsecond")

DO = {"hang": hang, "crash": crash, "noise": noise, "fail": fail, "exit": lambda answer: sys.exit(3),
      "none": lambda answer: None, "nan": lambda answer: float("nan"), "word": lambda answer: "1", "huge": lambda answer: 10**400,
      "true": lambda answer: True, "number": lambda answer: answer, "pid": lambda answer: os.getpid(),
      "big": lambda answer: len(bytearray(answer << 20)), "bomb": bomb,
      "leave": leave}

def task(seed, data):
    return Task("do", None, lambda answer, text: DO[text](answer))
"""
Result = tuple[object, float, str, str]


@pytest.fixture
def do(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    """Makes pools of the task above."""
    (tmp_path / "do.py").write_text(TASK)
    pools: list[RewardPool] = []

    def make(**settings: float) -> RewardPool:
        pools.append(RewardPool(str(tmp_path / "do.py"), 0, **{"timeout_s": 60.0, **settings}))  # a busy machine is no failure
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def drain(pool: RewardPool, deadline_s: float = 60.0) -> list[Result]:
    results, end = [], time.monotonic() + deadline_s
    while pool.num_pending:
        assert time.monotonic() < end, f"{pool.num_pending} samples without a result after {deadline_s} s"
        results += pool.poll()
        time.sleep(0.001)
    return results


def judge(pool: RewardPool, *samples: tuple[object, str]) -> list[Result]:
    """Results of (answer, text) samples, in their order."""
    for number, (answer, text) in enumerate(samples):
        pool.submit(number, answer, text)
    return sorted(drain(pool))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def all_ready(pool: RewardPool) -> bool:
    return pool.poll() == [] and all(worker.ready for worker in pool._workers)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)


def test_verdicts(do: Callable[..., RewardPool]) -> None:
    texts = ("number", "true", "none", "nan", "word", "fail", "huge", "noise", "exit", "crash", "number")
    results = judge(do(), *((2.5, text) for text in texts))
    assert [(text, reward, verdict) for text, (_, reward, verdict, _) in zip(texts, results, strict=True)] == [
        ("number", 2.5, "ok"),
        ("true", 1.0, "ok"),
        ("none", 0.0, "no_verdict"),
        ("nan", 0.0, "no_verdict"),
        ("word", 0.0, "no_verdict"),
        ("fail", 0.0, "infra_error"),
        ("huge", 0.0, "infra_error"),
        ("noise", 0.25, "ok"),
        ("exit", 0.0, "infra_error"),
        ("crash", 0.0, "infra_error"),
        ("number", 2.5, "ok"),
    ]
    details = {text: detail for text, (_, _, _, detail) in zip(texts, results, strict=True)}
    assert details["none"] == "the reward is None, not a finite number"
    assert details["fail"] == "KeyError: 'first\\nsecond'" and details["number"] == ""
    assert details["exit"] == "the reward process died (exit code 3)" and "SIGKILL" in details["crash"]


def test_built_in_tasks_take_the_same_path() -> None:
    pool = RewardPool("sort", 0, num_workers=2)
    results = judge(pool, *(("123459", "123459" if i % 3 else "539214") for i in range(300)))
    assert [reward for _, reward, _, _ in results] == [float(i % 3 > 0) for i in range(300)]
    assert {verdict for _, _, verdict, _ in results} == {"ok"}
    pool.close()


def test_a_reward_past_its_deadline_is_killed_with_what_it_started(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool = do(timeout_s=2.0)
    results = judge(pool, (1, "number"), (str(tmp_path / "pids"), "hang"), *[(2, "number")] * 5)
    assert [verdict for _, _, verdict, _ in results] == ["ok", "timeout", *["ok"] * 5]  # those queued behind it are judged by its successor
    assert results[1][3] == "no answer within 2 s"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")


def test_a_reward_that_forks_without_end_is_killed_whole(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    """Some 800 processes in 200 groups and as many sessions."""
    results = judge(do(timeout_s=3.0), (str(tmp_path / "pids"), "bomb"), (1, "number"))
    assert [verdict for _, _, verdict, _ in results] == ["timeout", "ok"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) > 20
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")
    assert _sleepers() == []


def _sleepers() -> list[int]:
    """Processes that only the rewards of this file start."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path) == b"sleep\x001000\0"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_reward_that_eats_memory_gets_an_error_and_costs_only_itself(do: Callable[..., RewardPool]) -> None:
    results = judge(do(memory_gib=0.5), (10, "big"), (4000, "big"), (3, "number"))
    assert [result[1:] for result in results] == [(10 << 20, "ok", ""), (0.0, "infra_error", "MemoryError: "), (3, "ok", "")]


def test_a_deadline_is_for_one_sample_not_for_the_queue(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    reward = "lambda answer, text: time.sleep(0.2) or 1"
    slow.write_text(f"import time\nfrom miles_core.tasks import Task\ntask = lambda seed, data: Task('slow', None, {reward})")
    pool = RewardPool(str(slow), 0, timeout_s=1.8)
    assert {verdict for _, _, verdict, _ in judge(pool, *[(0, "")] * 10)} == {"ok"}  # 2 s in all
    pool.close()


def test_work_is_shared_and_survives_a_worker_killed_from_outside(do: Callable[..., RewardPool]) -> None:
    pool = do(num_workers=3)
    wait_until(lambda: all_ready(pool), "three workers ready")
    assert len({reward for _, reward, _, _ in judge(pool, *[(0, "pid")] * 60)}) == 3
    os.kill(pool._workers[1].process.pid, signal.SIGKILL)
    results = judge(pool, *[(1, "number")] * 60)
    # One that dies while idle costs nothing; one that has work already loses the sample it may have died of.
    assert sum(verdict == "ok" for _, _, verdict, _ in results) >= 59 and len(results) == 60


def test_large_batches_do_not_block_the_caller(do: Callable[..., RewardPool]) -> None:
    pool, longest = do(), 0.0
    for number in range(64):
        pool.submit(number, "x" * 100_000, "true")  # 6 MB through pipes of 64 KB
    results = []
    while pool.num_pending:
        start = time.thread_time()  # what we do ourselves: waiting for a busy machine is not our fault
        results += pool.poll()
        longest = max(longest, time.thread_time() - start)
        time.sleep(0.001)
    assert sorted(result[0] for result in results) == list(range(64)) and longest < 0.5


def test_failures_in_a_row_stop_the_run(do: Callable[..., RewardPool]) -> None:
    pool = do()
    judge(pool, *[(1, "fail")] * (MAX_FAILURES - 1), (1, "number"))  # an `ok` starts the count anew
    judge(pool, *[(1, "none")] * (MAX_FAILURES - 1))
    said = rf"--task .*do.py: {MAX_FAILURES} rewards in a row failed, first with no_verdict \(the reward is None"
    with pytest.raises(ValueError, match=said):
        judge(pool, (1, "fail"))


def test_a_reward_that_always_hangs_stops_the_run(do: Callable[..., RewardPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "MAX_FAILURES", 3)
    said = r"3 rewards in a row failed, first with timeout \(no answer within 0.2 s\).* raise --reward-timeout 0.2"
    with pytest.raises(ValueError, match=said):
        judge(do(timeout_s=0.2), *[(str(tmp_path / "pids"), "hang")] * 3)


@pytest.mark.parametrize(
    ("source", "said"),
    [("import nowhere", "No module named 'nowhere'"), ("import os; os._exit(4)", r"the reward process died \(exit code 4\)")],
)
def test_a_task_that_does_not_load_in_its_process_stops_the_run(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    pool = RewardPool(str(tmp_path / "bad.py"), 0)
    with pytest.raises(ValueError, match=f"bad.py: its reward process does not start: .*{said}"):
        judge(pool, (0, ""))
    pool.close()


def test_close_leaves_no_process(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool, file = do(num_workers=2), tmp_path / "pids"
    pool.submit(0, str(file), "hang")
    wait_until(lambda: all_ready(pool) and file.exists() and len(file.read_text().split()) == 4, "a reward that hangs")
    pids = [int(pid) for pid in file.read_text().split()] + [worker.process.pid for worker in pool._workers]
    assert all(map(is_alive, pids))
    pool.close()
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")


def test_close_ends_what_a_reward_has_left_behind(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool, file = do(), tmp_path / "pids"
    assert [result[2] for result in judge(pool, (str(file), "leave"))] == ["ok"]
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    pool.close()
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")


def test_workers_die_with_their_parent_and_so_does_what_rewards_started(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    """A rank killed with SIGKILL, one worker idle and one in the middle of a reward that hangs."""
    do()  # writes the task's file
    file = tmp_path / "pids"
    code = f"""
import os, time
from miles_core.tasks.rewards import RewardPool
pool = RewardPool({str(tmp_path / "do.py")!r}, 0, num_workers=2)
pool.submit(0, {str(file)!r}, "hang")
while not all(worker.ready for worker in pool._workers) or not os.path.exists({str(file)!r}):
    pool.poll()
    time.sleep(0.01)
print(*(worker.process.pid for worker in pool._workers), flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    wait_until(lambda: len(file.read_text().split()) == 4, "a reward that hangs")
    pids += [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 6 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")


def test_a_rank_that_dies_while_it_kills_a_worker_leaves_nothing(do: Callable[..., RewardPool], tmp_path: Path) -> None:
    """SIGKILL at each line of that in turn."""
    do()  # writes the task's file
    code = f"""
import os, signal, sys, time
from miles_core.tasks.rewards import RewardPool, _Worker
pool = RewardPool({str(tmp_path / "do.py")!r}, 0)
pool.submit(0, sys.argv[1], "hang")
while not os.path.exists(sys.argv[1]) or len(open(sys.argv[1]).read().split()) < 4:
    pool.poll()
    time.sleep(0.01)
print(pool._workers[0].process.pid, flush=True)
lines = int(sys.argv[2])
def trace(frame, event, _):
    global lines
    if frame.f_code not in (_Worker._kill.__code__, _Worker._has_ended.__code__):
        return None
    lines -= event == "line"
    if lines < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace
sys.settrace(trace)
pool.close()
"""
    files = [tmp_path / f"pids-{number}" for number in range(9)]
    parents = [
        subprocess.Popen([sys.executable, "-c", code, file, str(number)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for number, file in enumerate(files)
    ]
    pids = [int(parent.communicate(timeout=60)[0]) for parent in parents] + [int(pid) for file in files for pid in file.read_text().split()]
    assert [parent.returncode for parent in parents] == [-signal.SIGKILL] * len(files)
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")
