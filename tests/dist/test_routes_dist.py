"""Routes between processes: every payload arrives once, byte for byte, or the run stops and names the trajectory and its owner.

    python -m pytest tests/dist/test_routes_dist.py

Legend: T tokens, R recorded tokens, L MoE layers, K slots.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import run_ranks

from miles_core import pack
from miles_core.model.moe import MoEConfig
from miles_core.route_transport import DROP, Fetch, Key, Mailbox, RouteStore, Want, plan
from miles_core.routing import encode
from miles_core.schema import Trajectory
from miles_core.topology import Layout, Topology

MOE = MoEConfig(257, 3, 8, (0, 1))  # ids of two bytes
CPU = torch.device("cpu")
NUM_STEPS, GROUPS_A_STEP, NUM_SAMPLES = 4, 3, 4


def topology(world_size: int, rollout_ranks: int, timeout_s: float = 20.0) -> Topology:
    return Topology(Layout(world_size, world_size, rollout_ranks), CPU, torch.float32, timeout_s)


def make(group: int, sample: int, sibling: int) -> tuple[Trajectory, torch.Tensor]:
    """A trajectory of 4 to 60 tokens (one of 2,000) and its routes, decided by its key; its last row is missing, and some more."""
    random = np.random.default_rng([group, sample, sibling])
    prompt, answer = int(random.integers(2, 20)), 1998 if (group, sample) == (1, 1) else int(random.integers(2, 40))
    length = prompt + answer
    mask = np.r_[np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]
    made = Trajectory(
        group=group, sample=sample, sibling=sibling, tokens=random.integers(0, 99, length).astype(np.int32), loss_mask=mask,
        logp_roll=np.zeros(length, np.float32), version=np.array([[0, answer]], np.int32), turns=np.array([prompt, answer], np.int32),
        finish=0, episode_tokens=2000,
    )  # fmt: skip
    recorded_T = np.r_[random.random(length - 1) < 0.9, False]
    rows_RLK = torch.from_numpy(random.integers(0, 257, (int(recorded_T.sum()), 2, 3)).astype(np.int16))
    return made, encode(rows_RLK, recorded_T)


def keep(store: RouteStore, names: list[Key]) -> list[Trajectory]:
    kept = []
    for trajectory, payload in (make(*name) for name in names):
        store.keep(trajectory, payload)
        kept.append(trajectory)
    return kept


def shares_of(step: int, everything: list[Trajectory]) -> tuple[list[list[Trajectory]], list[Trajectory]]:
    """What each of two training ranks packs in this step, and what is dropped: about one in five, and all of one step."""
    here = [t for t in everything if t.group // GROUPS_A_STEP == step]
    dropped = {t.key: t for t in here if (t.group + t.sample) % 5 == 0 or step == 2}
    return pack.balance([t for t in here if t.key not in dropped], 2), [*dropped.values()]


def receive(fetch: Fetch, mine: list[Trajectory]) -> list[Key]:
    """Pack, attach, and compare with what was made. Returns whose rows came."""
    names = []
    for batch in pack.pad(pack.pack(mine, 2100), 3):
        batch = fetch.attach(batch)
        if batch.routes_TLK is None:
            assert batch.ids_S3.tolist() == [[-1, -1, -1]], "only a dummy has no rows"
            continue
        ends = batch.cu_seqlens_S1.tolist()
        for name, begin, end in zip(map(tuple, batch.ids_S3.tolist()), ends, ends[1:], strict=False):
            rows_TLK, recorded_T = batch.routes_TLK[begin:end], batch.routed_T[begin:end]
            assert torch.equal(encode(rows_TLK[recorded_T], recorded_T.numpy()), make(*name)[1]), name
            names.append(name)
    assert not fetch.arriving
    return names


def names_of(trajectories: list[Trajectory]) -> list[Key]:
    return sorted(t.key for t in trajectories)


# The even samples have two branches, which may go to different ranks.
BRANCHES = [(sample, sibling) for sample in range(NUM_SAMPLES) for sibling in range(2 - sample % 2)]
ALL = [(group, *branch) for group in range(NUM_STEPS * GROUPS_A_STEP) for branch in BRANCHES]


def apart() -> list[list[Key]]:
    """Ranks 0 and 1 roll out, 2 and 3 train. Returns the names that came, step by step."""
    topo = topology(4, 2)
    mailbox = Mailbox.create([0, 1], GROUPS_A_STEP * len(BRANCHES)) if topo.is_node_leader else None
    path = next(path for path in topo.gather(mailbox and mailbox.segment.path) if path)
    store = RouteStore(topo.rank, topo.route_group)
    mine = keep(store, [name for name in ALL if name[0] % 2 == topo.rank]) if topo.rolls_out else []
    everything = [t for part in topo.gather(mine) for t in part]
    assert names_of(everything) == ALL
    came = []
    if topo.rolls_out:
        box, served = Mailbox.attach(path), 0
        while served < NUM_STEPS:
            wanted = box.poll(topo.rank)
            served += wanted is not None
            assert all(want.owner == topo.rank for want in wanted or [])
            store.serve(wanted)
        assert box.poll(topo.rank) is None
    else:
        for step in range(NUM_STEPS):
            shares, dropped = shares_of(step, everything)
            if mailbox is not None:
                mailbox.post(plan(shares, [2, 3], dropped), 20.0)
            fetch = Fetch(shares[topo.rank - 2], None, topo.route_group, MOE, CPU, 20.0)
            came.append(receive(fetch, shares[topo.rank - 2]))
    topo.gather(None)
    assert not store.rows, "nothing is left: sent or dropped"
    return came


def test_every_payload_arrives_once_and_byte_for_byte() -> None:
    _, _, first, second = run_ranks(4, apart)
    everything = [make(*name)[0] for name in ALL]
    for step in range(NUM_STEPS):
        shares, dropped = shares_of(step, everything)
        assert sorted(first[step]) == names_of(shares[0]) and sorted(second[step]) == names_of(shares[1])
        assert (len(dropped) == GROUPS_A_STEP * len(BRANCHES)) == (step == 2)


def together(num_ranks: int) -> list[Key]:
    """Every rank rolls out and trains: all know the plan, so each serves it and then receives."""
    topo = topology(num_ranks, 0)
    store = RouteStore(topo.rank, topo.route_group)
    mine = keep(store, [name for name in ALL if name[0] % num_ranks == topo.rank])
    everything = [t for part in topo.gather(mine) for t in part]
    came = []
    for step in range(NUM_STEPS):
        (first, second), dropped = shares_of(step, everything)
        shares = [first, second] if num_ranks == 2 else [first + second]
        store.serve(plan(shares, topo.node_trainers, dropped))
        came += receive(Fetch(shares[topo.rank], store, topo.route_group, MOE, CPU, 20.0), shares[topo.rank])
    topo.gather(None)
    assert not store.rows
    return came


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_colocated_ranks_exchange_theirs(num_ranks: int) -> None:
    came = [name for names in run_ranks(num_ranks, together, num_ranks) for name in names]
    everything = [make(*name)[0] for name in ALL]
    kept = [t for step in range(NUM_STEPS) for share in shares_of(step, everything)[0] for t in share]
    assert sorted(came) == names_of(kept)


def test_a_plan_is_sorted_and_leaves_out_what_has_no_owner() -> None:
    trajectories = [make(*key)[0] for key in ((3, 1, 0), (0, 2, 1), (0, 2, 0), (3, 0, 0), (1, 0, 0), (2, 2, 0))]
    for trajectory in trajectories[:5]:
        trajectory.route_owner, trajectory.route_bytes = 7, 9
    found = plan([trajectories[:2], trajectories[2:4]], [4, 5], trajectories[4:])
    expected = [(0, 2, 0, 7, 5, 9), (0, 2, 1, 7, 4, 9), (1, 0, 0, 7, DROP, 9), (3, 0, 0, 7, 5, 9), (3, 1, 0, 7, 4, 9)]
    assert found == [Want(*row) for row in expected]


# ---- faults: rank 0 rolls out, rank 1 trains


NAME, WHO = (4, 1, 1), "routes of group 4 sample 1 sibling 1 from rank 0"
DAMAGED = f"{WHO} arrived damaged: the checksum does not match; nothing was trained on it"
ROW = 12  # bytes


def serve_badly(store: RouteStore, fault: str, payload: torch.Tensor) -> None:
    """The rollout rank's part, after the trainer knows of the trajectory."""
    if fault == "killed later":
        time.sleep(0.5)
    if fault.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "silent":
        time.sleep(2.5)
        return
    store.rows[NAME] = payload.clone()
    if fault == "flipped":
        store.rows[NAME][len(payload) // 2] ^= 4
    if fault == "cut":
        store.rows[NAME] = payload[:-ROW].clone()
    store.serve([Want(*NAME, 0, 1, len(store.rows[NAME]))])


def one_fault(fault: str, timeout_s: float, told: Path) -> None:
    """Writes the trainer's error to `told`: the other rank's death ends the job."""
    topo = topology(2, 1)
    trajectory, payload = make(*NAME)
    if fault == "of another length":
        payload = payload[:-ROW]
    store = RouteStore(0, topo.route_group)
    store.keep(trajectory, payload)
    topo.gather(None)
    if topo.rolls_out:
        serve_badly(store, fault, payload)
    else:
        if fault == "killed":
            time.sleep(0.3)
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            fetch = Fetch([trajectory], None, topo.route_group, MOE, CPU, timeout_s)
            fetch.attach(pack.pack([trajectory], 100)[0])
        assert time.monotonic() - started < timeout_s + 1.0
        told.write_text(str(error.value))
    if fault != "silent":  # then the group is broken
        topo.gather(None)


@pytest.mark.parametrize(
    ("fault", "timeout_s", "expected"),
    [
        ("flipped", 20.0, DAMAGED),
        ("cut", 20.0, DAMAGED),
        ("of another length", 20.0, rf"{WHO}: \d+ bytes of routes for \d+ tokens, \d+ of them recorded: not \d+"),
        ("silent", 1.0, rf"{WHO} did not arrive \(the deadline is 1 s\): .*"),
    ],
)
def test_routes_that_cannot_be_used_stop_the_run(fault: str, timeout_s: float, expected: str, tmp_path: Path) -> None:
    run_ranks(2, one_fault, fault, timeout_s, tmp_path / "told")
    assert re.fullmatch(expected, (tmp_path / "told").read_text())


@pytest.mark.parametrize("fault", ["killed", "killed later"])
def test_an_owner_that_dies_is_named(fault: str, tmp_path: Path) -> None:
    """Before the trainer asks, or while it waits."""
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed first .*\n.*exit code -9"):
        run_ranks(2, one_fault, fault, 20.0, tmp_path / "told")
    assert (tmp_path / "told").read_text().startswith(f"{WHO} did not arrive (the deadline is 20 s): ")


def dropped_while_under_way() -> None:
    """Rank 0 sends late; rank 1 leaves the step before it has used anything."""
    topo = topology(2, 1)
    trajectory, payload = make(*NAME)
    store = RouteStore(0, topo.route_group)
    store.keep(trajectory, payload)
    if topo.rolls_out:
        time.sleep(0.5)
        store.serve([Want(*NAME, 0, 1, len(payload))])
        store.serve([])  # waits until it has been taken
    else:
        fetch = Fetch([trajectory], None, topo.route_group, MOE, CPU, 20.0)
        (buffer, _), = fetch.arriving.values()
        fetch.drop()
        assert torch.equal(buffer, payload) and not fetch.arriving, "it is there, and nobody waits for it any more"
    topo.gather(None)


def test_a_step_that_is_left_takes_what_is_under_way() -> None:
    run_ranks(2, dropped_while_under_way)


def test_a_trajectory_without_rows_is_refused() -> None:
    message = "group 0 sample 1 came without routes while --routing-replay is on: nothing was trained on it"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        Fetch([make(0, 1, 0)[0]], None, None, MOE, CPU, 1.0)


def test_a_rank_that_is_asked_for_what_it_does_not_hold_says_so() -> None:
    store = RouteStore(3, None)
    keep(store, [(0, 0, 0), (0, 1, 0)])
    store.serve([Want(0, 0, 0, 3, DROP, 0), Want(0, 1, 0, 3, 3, 0), Want(0, 2, 0, 4, DROP, 0)])  # drop; leave for itself; not for this rank
    assert list(store.rows) == [(0, 1, 0)]
    for name in ((0, 0, 0), (5, 5, 0)):
        with pytest.raises(RuntimeError, match=f"rank 3 has no routes of group {name[0]} sample {name[1]}"):
            store.serve([Want(*name, 3, DROP, 0)])


def test_an_owner_that_holds_another_size_says_so() -> None:
    """Before it sends: a receiver with too little room would be lost without a word."""
    store = RouteStore(3, None)
    keep(store, [(0, 0, 0)])
    with pytest.raises(AssertionError, match=r"Want\(group=0, sample=0, sibling=0, owner=3, destination=1, nbytes=2\)"):
        store.serve([Want(0, 0, 0, 3, 1, 2)])


def test_a_mailbox_holds_one_list_until_its_owner_has_seen_it() -> None:
    box = Mailbox.create([1, 4], 3)
    other = Mailbox.attach(box.segment.path)
    first = [Want(0, 0, 0, 4, 2, 8), Want(0, 1, 0, 1, 3, 8), Want(1, 0, 0, 4, DROP, 8)]
    box.post(first, 1.0)
    assert other.poll(4) == [first[0], first[2]] and other.poll(4) is None
    with pytest.raises(TimeoutError, match="waited 0.05 s for rollout rank 1 to serve 1 requests for routes"):
        box.post([], 0.05)
    assert other.poll(1) == [first[1]]
    box.post([], 1.0)
    assert other.poll(1) == [] and other.poll(4) == []
