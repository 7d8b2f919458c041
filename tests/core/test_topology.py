"""Roles of any world, without a process group. Run: python -m pytest tests/core/test_topology.py"""

import datetime
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from miles_core.topology import Layout, layout_from_env, name_this_start


def test_two_nodes_of_four_with_one_rollout_rank_each():
    layout = Layout(8, 4, 1)
    assert layout.ranks(train=False) == [0, 4]
    assert layout.ranks(train=True) == [1, 2, 3, 5, 6, 7]
    assert layout.ranks(train=True, node=1) == [5, 6, 7]
    assert layout.num_nodes == 2 and not layout.colocated


@pytest.mark.parametrize("world,local,num_rollout", [(1, 1, 0), (4, 4, 0), (4, 4, 3), (16, 8, 2), (6, 3, 1)])
def test_roles_cover_every_rank(world, local, num_rollout):
    layout = Layout(world, local, num_rollout)
    training, rolling = layout.ranks(train=True), layout.ranks(train=False)
    assert sorted({*training, *rolling}) == list(range(world))
    assert set(training) & set(rolling) == (set(range(world)) if num_rollout == 0 else set())
    assert len(layout.describe().splitlines()) == world
    assert layout.describe().count("node leader") == layout.num_nodes


@pytest.mark.parametrize(
    ("world", "local", "num_rollout", "message"),
    [
        (6, 4, 1, "--nproc-per-node 4 does not divide the world of 6"),
        (4, 4, 4, "--rollout-ranks-per-node 4 leaves no training rank among the 4"),
        (4, 4, -2, "--rollout-ranks-per-node -2"),
        (1, 1, 1, "--rollout-ranks-per-node 1 leaves no training rank"),
    ],
)
def test_sizes_that_do_not_divide_name_the_flag(world, local, num_rollout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(world, local, num_rollout)


def test_default_split_is_half_of_the_node(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert layout_from_env(-1) == Layout(16, 8, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert layout_from_env(-1).colocated


def test_starts_that_share_a_store_get_names_of_their_own():
    """Also when ranks of the start before have died at any point of it, and when rank 0 comes first, last or in between."""
    store, world, names = dist.HashStore(), 4, set()
    with ThreadPoolExecutor(world) as pool:
        for start in range(12):
            store.set("miles/ask/2", "dead"), store.set(f"miles/ask/{1 + start % 3}", f"dead too, in start {start}")
            order = [(start + i) % world for i in range(world)]
            found = [name.result() for name in [pool.submit(name_this_start, store, rank, world, 20.0) for rank in order]]
            assert len(set(found)) == 1
            names.update(found)
    assert len(names) == 12


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (2, "rank 0")])
def test_a_start_that_lacks_a_rank_says_which(rank, missing):
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match=f"rank {rank} waited 0.2 s for {missing} to start"):
        name_this_start(store, rank, 3, 0.2)
