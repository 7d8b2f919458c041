"""The long chaos run: test_chaos.py, until it is boring. Prints counts; ends with an assertion at the first thing that is wrong.

    OMP_NUM_THREADS=1 python tests/chaos/long.py --kills 60 --flips 200 --seed 0        # about 25 minutes on two cores

 1. kill -9 of ranks, at injected lines and at random moments, synchronous and asynchronous: exactly once, and the same bits
 2. kill -STOP of a rank for longer than the deadline
 3. flipped bits and cut files, in journal and checkpoints, and in slots of the ring: found, never read, and the run goes on
 4. no room on the disk, for each kind of file: one sentence, and nothing is lost
 5. the time from a SIGKILL to the next optimizer step, and where it goes
 6. kill -9 of ranks of two nodes
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chaos  # first: it puts the project and the e2e helpers on the path
from chaos import FLAGS, POINTS, PROMPTS, STEPS, Chaos
from harness import ROOT, Ended, Job, consumed_groups, find, steps, succeed, two_nodes

from miles_core import checkpoint, journal
from miles_core.journal_file import Damaged, load

ASYNC = ("--max-staleness", 3)


def kills(directory: Path, wanted: int, rng: random.Random) -> None:
    """Jobs until so many processes have been killed."""
    quiet = directory / "quiet"
    quiet.mkdir()
    succeed(quiet, *FLAGS, "--max-staleness", 0, "--rollout-ranks-per-node", 0, ranks=1)
    points = rng.sample(POINTS, len(POINTS))
    killed = restarts = number = 0
    restored = made_again = 0.0
    while killed < wanted:
        number += 1
        mine = [(role, name, rng.randint(1, most)) for role, name, most in points[:5]]
        points = points[5:] + points[:5]
        cwd = directory / f"job{number}"
        cwd.mkdir()
        job = Chaos(cwd, rng.randrange(1 << 30), synchronous=number % 2 == 1, rollout_ranks=rng.choice([1, 2]), deadline_s=600)
        ended = job.run(mine, num_kills=3)
        job.check(ended, quiet / "run" if job.synchronous else None)
        deaths = ended.err.count("was killed by SIGKILL") + sum(max(0, life.count(",")) for life in job.lives)
        killed, restarts = killed + deaths, restarts + ended.err.count("starting all ranks again")
        restored += sum(max(0.0, step["ring/restored"]) for step in steps(job.run_dir)[-1:])
        made_again += sum(max(0.0, step["ring/made_again"]) for step in steps(job.run_dir)[-1:])
        kind = "synchronous" if job.synchronous else "asynchronous"
        what = f"{kind}, {job.rollout_ranks} rollout"
        print(f"  job {number}, {what}: {deaths} killed, {ended.seconds:.0f} s; {killed} of {wanted}", flush=True)
    print(f"1. {killed} processes killed in {number} jobs, {restarts} restarts; 0 groups lost, 0 doubled, 0 jobs hung; in the last lives "
          f"{restored:.0f} groups came from the journal, {made_again:.0f} were made again", flush=True)


def stops(directory: Path) -> None:
    for rank in (0, 1):
        cwd = directory / f"stop{rank}"
        cwd.mkdir()
        chaos_job = Chaos(cwd, rank, synchronous=False)
        job = Job(cwd, *chaos_job.flags(), "--timeout", 5, ranks=2, MAX_RESTARTS="1", E2E_REWARD_S="0.05")
        job.wait_until(lambda job=job: "step 3/" in job.out, "three steps")
        os.kill(job.rank_pid(rank), signal.SIGSTOP)
        ended = job.end()
        chaos_job.check(ended)
        assert "starting all ranks again" in ended.err, str(ended)
    print("2. 2 ranks stopped for longer than the deadline: both jobs restarted and ended well", flush=True)


def recorded(directory: Path) -> Path:
    """A run that was killed after step 7, with two checkpoints and a journal that goes beyond them."""
    cwd = directory / "recorded"
    cwd.mkdir()
    job = Job(cwd, *FLAGS, *ASYNC, "--journal-keep", 0, ranks=2, E2E_REWARD_S="0.1")
    job.wait_until(lambda: "step 7/" in job.out and (cwd / "run/checkpoints/step_000006").exists(), "seven steps and a checkpoint")
    os.kill(job.rank_pid(1), signal.SIGKILL)
    job.end()
    return cwd / "run"


def files_of(directory: Path) -> list[Path]:
    """Real files: `latest` is a link."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and "latest" not in path.parts]


def damage(path: Path, rng: random.Random) -> str:
    """Flip a bit or cut the file."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3 and len(data) > 1:
        length = rng.randrange(len(data))
        path.write_bytes(data[:length])
        return f"cut to {length}"
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit}"


def groups_in(run: Path) -> tuple[dict[int, bytes], int]:
    """{group: its tokens} that the journal gives, and how much it says is damaged."""
    found, unreadable = journal.read(run / "journal")
    groups, faults = {}, len(unreadable)
    for contents in found:
        faults += contents.num_damaged + (contents.torn > 0)
        for entry in contents.entries:
            try:
                groups[entry.group] = b"".join(t.tokens.tobytes() + t.logp_roll.tobytes() for t in load(entry)[0])
            except Damaged:
                faults += 1
    return groups, faults


def flips(directory: Path, number: int, rng: random.Random) -> None:
    run = recorded(directory)
    files = [path for kind in ("journal", "checkpoints") for path in files_of(run / kind)]
    original, _ = groups_in(run)
    found = {"journal": 0, "checkpoints": 0}
    for _ in range(number):
        path = rng.choice(files)
        saved = path.read_bytes()
        what = damage(path, rng)
        if path.suffix == ".journal":
            groups, faults = groups_in(run)
            whole = path.stat().st_size > 0 and all(original[g] == data for g, data in groups.items())
            lost = original.keys() - groups.keys()
            assert whole or path.stat().st_size == 0, (path, what)
            assert bool(lost) <= bool(faults) or "cut" in what, (path, what, lost, faults)
            found["journal"] += bool(lost or faults)
        else:
            step = next(parent for parent in path.parents if parent.name.startswith("step_"))
            try:
                checkpoint.read_meta(step)
                raise AssertionError(f"{path} {what}: not noticed")
            except checkpoint.Damaged:
                found["checkpoints"] += 1
        path.write_bytes(saved)
    print(f"3. {number} files flipped or cut: {found} noticed, none read as what it was not", flush=True)
    for number_of_job in range(4):
        cwd = directory / f"flip{number_of_job}"
        shutil.copytree(run, cwd / "run", symlinks=True)
        hurt = files_of(cwd / "run/journal") + files_of(cwd / "run/checkpoints/step_000006")
        what = [damage(path, rng) for path in rng.sample(hurt, 3)]
        ended = succeed(cwd, *FLAGS, *ASYNC, "--journal-keep", 0, ranks=2)
        found_steps = steps(cwd / "run")
        groups = sorted(g for step in found_steps for g in consumed_groups(step, PROMPTS))
        assert groups == list(range(STEPS * PROMPTS)), (what, groups, str(ended))
    print("   4 jobs went on from such directories: each group trained on exactly once", flush=True)


def full_disks(directory: Path) -> None:
    said = []
    # what a rank writes that generates: the journal; that trains: metrics.jsonl, steps.jsonl, TensorBoard, and checkpoints
    for rank, limit in ((0, 2_000), (0, 12_000), (1, 100), (1, 2_000), (1, 600_000), (1, 3_000_000)):
        cwd = directory / f"full{rank}-{limit}"
        cwd.mkdir()
        job = Job(cwd, *FLAGS, *ASYNC, ranks=2, E2E_REWARD_S="0.05")
        job.wait_until(lambda job=job: "step 2/" in job.out, "two steps")
        resource.prlimit(job.rank_pid(rank), resource.RLIMIT_FSIZE, (limit, limit))
        ended = job.end()
        assert ended.code == 2 and "Traceback" not in ended.err.splitlines()[-1], str(ended)
        said.append(ended.err.splitlines()[-1][:90])
        succeed(cwd, *FLAGS, *ASYNC, ranks=2)
        groups = sorted(g for step in steps(cwd / "run") for g in consumed_groups(step, PROMPTS))
        assert groups == list(range(STEPS * PROMPTS)), (limit, groups)
    print("4. 6 disks full at different moments: exit code 2, and nothing lost after a resume. What was said:", flush=True)
    for sentence in sorted(set(said)):
        print(f"     {sentence}", flush=True)


def time_to_the_next_step(directory: Path, rounds: int = 5) -> None:
    floor = []
    for _ in range(3):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import train"], cwd=ROOT, check=True)
        floor.append(time.monotonic() - started)
    laps: list[list[float]] = []
    cwd = directory / "time"
    cwd.mkdir()
    flags = ("--steps", 10_000, "--save-every", 5, "--eval-prompts", 0, "--run-dir", "run")
    job = Job(cwd, *flags, ranks=2, MAX_RESTARTS=str(rounds), deadline_s=600)
    for life in range(rounds):
        seen = job.out.count("/10000 [")  # lines of steps
        job.wait_until(lambda seen=seen: job.out.count("/10000 [") > seen + 8, "some steps")
        pid = job.rank_pid(1)
        os.kill(pid, signal.SIGKILL)
        times = [time.monotonic()]
        printed = job.out.count("/10000 [")
        for condition, what in (
            (lambda pid=pid: f"(pid {pid}) was killed" in job.files[1].read_text(), "the launcher"),
            (lambda life=life: job.out.count("run directory:") > life + 1, "a new start"),
            (lambda printed=printed: job.out.count("/10000 [") > printed, "a step"),
        ):
            job.wait_until(condition, what)
            times.append(time.monotonic())
        laps.append([b - a for a, b in zip(times, times[1:], strict=False)] + [times[-1] - times[0]])
    os.killpg(job.process.pid, signal.SIGINT)
    ended: Ended = job.end()
    assert ended.code == 0, str(ended)
    noticed, started, stepped, total = (statistics.median(column) for column in zip(*laps, strict=True))
    every = ", ".join(f"{lap[-1]:.1f}" for lap in laps)
    print(f"5. from SIGKILL to the next optimizer step: median {total:.1f} s of {rounds} (all: {every})\n"
          f"     {noticed:.1f} s until the other ranks have ended, {started:.1f} s to start, import and read the checkpoint "
          f"(importing alone: {statistics.median(floor):.1f} s), {stepped:.1f} s to load, publish, generate and train", flush=True)


def nodes(directory: Path, wanted: int, rng: random.Random) -> None:
    """Ranks of either node, one in each life of the job."""
    cwd, killed = directory / "nodes", []
    cwd.mkdir()
    jobs = two_nodes(cwd, *FLAGS, *ASYNC, "--save-every", 1, deadline_s=900, MAX_RESTARTS=str(wanted), E2E_REWARD_S="0.5")
    for life in range(wanted):
        jobs[0].wait_until(lambda life=life: sum(job.out.count("run directory:") for job in jobs) > life, f"life {life + 1}")
        time.sleep(rng.uniform(0.0, 3.0))
        _, pid = find(jobs, rank := rng.randrange(4))
        os.kill(pid, signal.SIGKILL)
        killed.append(rank)
    ended = [job.end() for job in jobs]
    for each in ended:
        lives = Chaos(cwd, 0, synchronous=False).check(each)
        assert len(each.err.splitlines()) == wanted, str(each)  # of either node one line for each restart, and no other
    print(f"6. two nodes: ranks {killed} killed in turn, {lives} incarnations, each group trained on exactly once", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="123456", help="numbers of the parts to run")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    parts = {
        "5": time_to_the_next_step, "1": lambda d: kills(d, arguments.kills, rng), "2": stops,
        "3": lambda d: flips(d, arguments.flips, rng), "4": full_disks, "6": lambda d: nodes(d, 8, rng),
    }  # fmt: skip
    started = time.monotonic()
    for number, part in parts.items():
        if number in arguments.only:
            with tempfile.TemporaryDirectory() as directory:
                part(Path(directory))
    print(f"done in {(time.monotonic() - started) / 60:.0f} minutes; {chaos.__name__} seed {arguments.seed}")


if __name__ == "__main__":
    main()
