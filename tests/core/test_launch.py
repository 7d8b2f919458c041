"""The scripts in launch/: exit codes of a job, the lines that run.sh and slurm.sbatch build, what install.sh asks pip for, the package.

    python -m pytest tests/core/test_launch.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.config import parse_args

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch"), ROOT / ".ci/run"])


def environment(*first_on_path: Path, **variables: str) -> dict[str, str]:
    """A user's environment, without what env.sh or SLURM would set; `python` is the one that runs the tests."""
    ours = ("OMP_", "TOKENIZERS_", "USE_HUB_", "TORCH", "GLOO_", "NPROC", "SLURM_", "VIRTUAL_ENV", "CONDA_PREFIX", "LOGLEVEL", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([*map(str, first_on_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return kept | {"PATH": path, "VIRTUAL_ENV": sys.prefix} | variables


def bash(command: str, **kwargs: object) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, **({"env": environment()} | kwargs))


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_parses(script: Path) -> None:
    run = bash(f"bash -n {script}")
    assert run.returncode == 0, run.stderr
    assert os.access(script, os.X_OK) or script.name in ("env.sh", "slurm.sbatch")


def test_env_keeps_what_the_user_set_and_gives_reasons() -> None:
    show = f"source {LAUNCH}/env.sh; echo $OMP_NUM_THREADS $USE_HUB_KERNELS $NPROC $GLOO_SOCKET_IFNAME"
    assert bash(show).stdout.split() == ["1", "0", "2", "lo"]
    kept = environment(OMP_NUM_THREADS="7", NPROC="4", TORCHRUN_ARGS="--nnodes 2")
    assert bash(show, env=kept).stdout.split() == ["7", "0", "4"]  # several nodes: loopback would not do
    cores = len(os.sched_getaffinity(0))
    for num_ranks, policy in ((cores, "unset"), (cores + 1, "PASSIVE")):
        run = bash(f"source {LAUNCH}/env.sh; echo ${{OMP_WAIT_POLICY-unset}}", env=environment(NPROC=str(num_ranks)))
        assert run.stdout.strip() == policy, (num_ranks, cores, run)
    lines = (LAUNCH / "env.sh").read_text().splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if "export" in line and "PATH" not in line:
            assert above.strip().startswith("#"), f"no reason is given above: {line}"


def test_run_line(tmp_path: Path) -> None:
    run = bash(f"{LAUNCH}/run.sh --model 'a dir' --steps 3", cwd=tmp_path, env=environment(NPROC="4", DRY="1"))
    words = shlex.split(run.stdout)
    assert words[:2] == ["python", str(LAUNCH / "torchrun.py")]
    assert words[-9:-7] == ["--max-restarts", "3"]
    assert words[-7:] == ["--nproc-per-node", "4", str(ROOT / "train.py"), "--model", "a dir", "--steps", "3"]


@pytest.mark.parametrize("recipe", ["smollm2_arithmetic", "gsm8k"])
def test_recipe_holds_valid_flags_that_are_not_defaults(recipe: str) -> None:
    run = bash(f"{LAUNCH}/recipes/{recipe}.sh", env=environment(DRY="1", DATA="data"))
    words = shlex.split(run.stdout)
    flags = words[words.index(str(ROOT / "train.py")) + 1 :]
    config, default = parse_args(flags, "train.py", ""), parse_args([], "train.py", "")
    given = {word.removeprefix("--").replace("-", "_") for word in flags if word.startswith("--")}
    assert {name for name in given if getattr(config, name) == getattr(default, name)} == set()


def test_slurm_line(tmp_path: Path) -> None:
    executable(tmp_path / "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames node[07-09]" ] && printf "node07\\nnode08\\nnode09\\n"\n')
    slurm = {"SLURM_JOB_ID": "123457", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "node[07-09]", "SLURM_GPUS_ON_NODE": "8"}
    env = environment(tmp_path, DRY="1", SLURM_SUBMIT_DIR=str(ROOT), **slurm)
    line = bash(f"bash {LAUNCH}/slurm.sbatch --task gsm8k", env=env, cwd=tmp_path)
    assert line.returncode == 0, line.stderr
    rendezvous = "--nnodes 3 --rdzv-backend c10d --rdzv-id 123457 --rdzv-endpoint node07:23457"
    same = bash(f"{LAUNCH}/run.sh --task gsm8k", env=env | {"TORCHRUN_ARGS": rendezvous, "NPROC": "8"}).stdout
    assert rendezvous in same
    assert line.stdout == f"srun --ntasks-per-node 1 --kill-on-bad-exit 1 {same}"


def test_slurm_outside_an_allocation_says_so(tmp_path: Path) -> None:
    run = bash(f"bash {LAUNCH}/slurm.sbatch", cwd=tmp_path)
    assert run.returncode != 0 and "sbatch" in run.stderr


RANK = """
import os, signal, sys, time
rank, how = int(os.environ["RANK"]), sys.argv[1]
open(f"{sys.argv[2]}/{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").write(str(os.getpid()))
if rank == 1 and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and how.isdigit() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(int(how))
if how in ("stop", "stuck"):
    import threading
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    while not asked.is_set():
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit(0 if how == "stop" or rank == 0 else 1)
if how == "mistake":
    if rank == 1:
        os.kill(int(os.environ["MILES_LAUNCHER"]), signal.SIGUSR1)
        sys.exit(2)
    time.sleep(60)
if how in ("kill", "wait") or int(how) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
"""


def start_job(directory: Path, how: str, *flags: str) -> subprocess.Popen:
    script = directory / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, LAUNCH / "torchrun.py", "--standalone", *flags, "--nproc-per-node", "2", script, how, directory]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=environment(OMP_NUM_THREADS="1"), **pipes)


def assert_no_rank_is_left(directory: Path) -> None:
    pids = [path.read_text() for path in directory.glob("[01]-*")]
    assert pids  # a rank that was slow to start may have been ended before it could write
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("2", 2, ""), ("3", 3, "rank 1 (pid {}) failed first, with exit code 3"), ("kill", 137, "rank 1 (pid {}) was killed by SIGKILL")],
)
def test_job_ends_with_the_code_of_the_first_failure(tmp_path: Path, how: str, code: int, said: str) -> None:
    job = start_job(tmp_path, how)
    out, err = job.communicate(timeout=60)
    assert job.returncode == code, err
    assert "Traceback" not in err and out == ""
    if said:
        assert said.format((tmp_path / "1-0").read_text()) in err
    else:
        assert err == ""  # a rank's own sentence stands alone
    assert_no_rank_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_job_that_waits_for_another_node_ends_when_it_is_asked(tmp_path: Path, number: signal.Signals) -> None:
    job = start_job(tmp_path, "wait", "--nnodes", "2")
    deadline, caught = time.monotonic() + 60, 1 << signal.SIGUSR1 - 1  # the handler that is set last
    while not int(re.search(r"SigCgt:\s(\w+)", Path(f"/proc/{job.pid}/status").read_text())[1], 16) & caught:
        assert time.monotonic() < deadline, "it never listened"
        time.sleep(0.05)
    time.sleep(1.0)
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + number, err
    assert "Traceback" not in err and not list(tmp_path.glob("[01]-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("how", "code"), [("wait", 128), ("stop", 0), ("stuck", 1)])
def test_signalled_job_lets_its_ranks_end(tmp_path: Path, how: str, number: signal.Signals, code: int) -> None:
    """Ranks that end with 0 make a job that does; one that fails, or dies of the signal, is not started again."""
    job = start_job(tmp_path, how, "--max-restarts", "2")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[01]-0"))) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    time.sleep(0.3)
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == (128 + number if how == "wait" else code), err
    assert "starting all ranks again" not in err and not list(tmp_path.glob("[01]-1"))
    assert_no_rank_is_left(tmp_path)


def test_a_rank_that_dies_starts_all_again_and_the_reason_is_said(tmp_path: Path) -> None:
    job = start_job(tmp_path, "3", "--max-restarts", "1")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert sorted(path.name for path in tmp_path.glob("[01]-*")) == ["0-0", "0-1", "1-0", "1-1"]
    pid = (tmp_path / "1-0").read_text()
    said = f"local rank 1 (pid {pid}) failed first, with exit code 3; what it said is above; starting all ranks again, restart 1 of 1"
    assert said in err and "Traceback" not in err


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    job = start_job(tmp_path, "mistake", "--max-restarts", "3")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out, err) == (2, "", "")
    assert not list(tmp_path.glob("[01]-1"))
    assert_no_rank_is_left(tmp_path)


# A `python` whose pip only writes down what it was asked for. Exit codes: $TORCH_IS_OLD for `import torch`, $NO_CPU_BUILD for a
# request to the index that pip is set up with.
FAKE_PYTHON = f"""#!/bin/bash
case "$*" in
  "-m pip --version") exit 0 ;;
  "-c import torch"*) exit $TORCH_IS_OLD ;;
  "-m pip install --disable-pip-version-check "*) ;;
  *) exec {sys.executable} "$@" ;;
esac
shift 4
echo "$*" >> "$ASKED"
if [ "$1" = --no-deps ]; then exit $NO_CPU_BUILD; fi
"""


def install(tmp_path: Path, *, has_cuda: bool, no_cpu_build: bool = False, torch_is_old: bool = True) -> tuple[list[str], str]:
    """Run install.sh in a fake active environment -> (what pip was asked for, what the user read)."""
    executable(tmp_path / "env/bin/python", FAKE_PYTHON)
    executable(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\nexit {int(not has_cuda)}\n")
    asked = tmp_path / "asked"
    variables = {"NO_CPU_BUILD": str(int(no_cpu_build)), "TORCH_IS_OLD": str(int(torch_is_old)), "ASKED": str(asked)}
    env = environment(tmp_path / "bin", **variables) | {"VIRTUAL_ENV": str(tmp_path / "env")}
    run = bash(f"{LAUNCH}/install.sh", env=env)
    assert run.returncode == 0, run.stderr
    return asked.read_text().splitlines(), run.stderr


def test_install_without_cuda_never_asks_for_an_unconstrained_torch(tmp_path: Path) -> None:
    asked, said = install(tmp_path, has_cuda=False)
    assert asked == [f"--no-deps -c {LAUNCH}/constraints-cpu.txt torch", f"-r {LAUNCH}/requirements.txt"]
    assert "no CUDA device" in said
    again, said = install(tmp_path, has_cuda=False)
    assert again == asked and said == "", "a second run has nothing to do"


def test_install_takes_the_cpu_build_from_pytorch_when_the_index_lacks_it(tmp_path: Path) -> None:
    asked, _ = install(tmp_path, has_cuda=False, no_cpu_build=True)
    assert asked[1] == f"--index-url https://download.pytorch.org/whl/cpu --no-deps -c {LAUNCH}/constraints-cpu.txt torch"


def test_install_with_cuda(tmp_path: Path) -> None:
    asked, _ = install(tmp_path, has_cuda=True)
    assert asked == [f"-c {LAUNCH}/constraints-cuda.txt torch", f"-r {LAUNCH}/requirements.txt"]


def test_install_keeps_the_torch_of_an_active_environment(tmp_path: Path) -> None:
    asked, said = install(tmp_path, has_cuda=False, torch_is_old=False)
    assert asked == [f"-r {LAUNCH}/requirements.txt"] and "keeping the torch" in said


def test_both_builds_of_torch_are_one_version() -> None:
    cpu, cuda = (re.search(r"^torch==(\S+)$", (LAUNCH / f"constraints-{kind}.txt").read_text(), re.M)[1] for kind in ("cpu", "cuda"))
    assert cpu == f"{cuda}+cpu"


def test_installed_package_is_complete(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("kernels", "miles_core"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("setup.py", "train.py", "rollout.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", target, source]
    subprocess.run(pip, check=True, timeout=120)
    wanted = {p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.parts[len(source.parts)] in ("kernels", "miles_core")}
    assert {p for p in wanted if p.suffix != ".md" and not (target / p).exists()} == set()
    code = "import kernels.linear, miles_core.schema; print(kernels.linear.__file__)"
    run = bash(f"python -c '{code}'", env=environment(PYTHONPATH=str(target)), cwd=tmp_path)
    assert run.stdout.startswith(str(target)), run.stderr
