"""The launcher itself: results in rank order, failures shown with their traceback, deadlines kept, nobody left behind.

    python -m pytest tests/dist/test_launcher.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks


def _sum_of_ranks(extra: torch.Tensor) -> torch.Tensor:
    dist.init_process_group("gloo")
    total = extra + dist.get_rank()
    dist.all_reduce(total)
    return total * 10 + dist.get_rank()


def _one_raises() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def _one_is_killed() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_hangs() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_ranks(world_size, _sum_of_ranks, torch.tensor(1.0))
    expected = sum(1.0 + rank for rank in range(world_size)) * 10
    assert [r.item() for r in results] == [expected + rank for rank in range(world_size)]


def test_failure_shows_the_rank_that_failed_first() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed first(?s:.)*KeyError: 'the cause'"):
        run_ranks(2, _one_raises)


def test_killed_rank_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank 2 of 3 failed first(?s:.)*died with exit code -9"):
        run_ranks(3, _one_is_killed)


def test_deadline_names_the_rank_and_where_it_was_and_leaves_nobody() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not finish(?s:.)*_one_hangs"):
        run_ranks(2, _one_hangs, timeout=20.0)
    assert time.monotonic() - start < 40
    assert multiprocessing.active_children() == []
