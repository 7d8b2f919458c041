"""The sandbox as a user meets it: a shell that lasts, files, every limit, grading, closing, and what is refused.

    python -m pytest tests/core/test_sandbox.py

Needs Debian's packages bubblewrap and util-linux. What an episode must not reach is in test_sandbox_escape.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.tasks import sandbox_command
from miles_core.tasks.sandbox import Limits, Sandbox, SandboxError
from miles_core.tasks.sandbox_command import build

HOME = "/work"
SMALL = Limits(memory_mb=200, processes=40, disk_mb=32, file_mb=8, cpu_s=60, episode_s=120.0, output_bytes=2000)
HOLD = "import time; held = bytearray({mb} << 20); held[::4096] = b'1' * len(held[::4096]); print('held', flush=True); time.sleep({s})"


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    """For tests that leave nothing behind."""
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def small() -> Iterator[Sandbox]:
    with Sandbox(limits=SMALL) as sandbox:
        yield sandbox


def test_the_shell_keeps_directory_variables_functions_and_status(shared: Sandbox) -> None:
    assert shared.run("mkdir -p a/b; cd a/b; export X='1  2'; y=3; f() { echo f$1; }; false").exit_code == 1
    assert shared.run('echo "$? $X $y $PWD"; f 4').output == f"1 1  2 3 {HOME}/a/b\nf4\n"
    assert shared.run("cd").exit_code == 0


def test_output_and_exit_code(shared: Sandbox) -> None:
    assert shared.run("echo out; echo err >&2; (exit 7)") == shared.run("printf 'out\\nerr\\n'; (exit 7)")
    assert shared.run("true").output == ""
    assert shared.run("kill -TERM $BASHPID; wait", 5).exit_code == 143
    assert shared.run("printf 'a\\377b'").output == "a\ufffdb"
    assert shared.run("echo ü; cat") == shared.run("printf 'ü\\n' # a program that reads finds nothing")
    assert shared.run("((((").exit_code == 2
    assert shared.run("no-such-program").exit_code == 127
    assert shared.run("cat <<'END'\nline 1\n'\"$(\nEND\n").output == "line 1\n'\"$(\n"


def test_a_long_command_arrives_whole(shared: Sandbox) -> None:
    assert shared.run(f"x={'y' * 300_000}; echo ${{#x}}").output == "300000\n"


def test_long_output_keeps_both_ends(small: Sandbox) -> None:
    result = small.run("seq 1 100000; echo end")
    head, note, tail = result.output.partition("\n[586899 bytes left out]\n")
    whole = "".join(f"{i}\n" for i in range(1, 100001)) + "end\n"
    assert (len(whole), note) == (588899, "\n[586899 bytes left out]\n")
    assert (head, tail) == (whole[:1000], whole[-1000:])


def test_a_shell_that_ends_is_replaced(shared: Sandbox) -> None:
    shared.run("cd /tmp; x=1")
    result = shared.run("echo bye; exit 3")
    assert result.exit_code == 3 and result.output.startswith("bye\n[the shell has ended")
    assert shared.run('echo "$x|$PWD"').output.startswith("|/")
    assert shared.run("cd; kill -9 $$").exit_code == 137
    assert shared.run("pwd").output == "/work\n"
    shared.run("mkdir gone; cd gone; rmdir ~/gone")
    assert shared.run("exit").exit_code == 0 and shared.run("echo here").output == "here\n"
    shared.run("cd")


@pytest.mark.parametrize("command", ["sleep 100; echo no", "while :; do :; done", "trap '' INT TERM; sleep 100 | cat", "kill -STOP $$"])
def test_a_late_command_is_killed_and_others_are_not(shared: Sandbox, command: str) -> None:
    shared.run("cd /tmp; sleep 1000 & echo $! > pid")
    start = time.monotonic()
    result = shared.run(command, 0.5)
    assert (result.exit_code, result.timed_out) == (124, True) and result.output.startswith("[timed out after 0.5 s: killed]\n")
    assert time.monotonic() - start < 5.0
    after = shared.run("pwd; ps -eo comm= --sort pid; kill $(cat pid); cd")
    assert after.output == "/tmp\npython3\nsleep\nbash\nps\n"


def test_a_daemon_does_not_hold_a_command_up(shared: Sandbox) -> None:
    start = time.monotonic()
    assert shared.run("(while sleep 0.05; do echo tick; done) & echo started", 30).output.startswith("started\n")
    assert time.monotonic() - start < 10.0
    assert "tick\n" in shared.run("sleep 0.5; kill %1; wait").output


@pytest.mark.parametrize(
    "command",
    [
        f'python3 -c "{HOLD.format(mb=250, s=9)}"',  # one process: the kernel refuses
        f'for i in 1 2 3 4; do python3 -c "{HOLD.format(mb=80, s=9)}" & done; wait',
        "python3 -c \"import mmap, time; m = mmap.mmap(-1, 300 << 20); m[:] = b'1' * (300 << 20); print('held'); time.sleep(9)\"",
    ],
)
def test_memory(small: Sandbox, command: str) -> None:
    result = small.run(command, 30)
    assert result.exit_code != 0 and not result.timed_out
    assert "MemoryError" in result.output or result.limit == "more than 200 MB of memory"
    assert small.run("echo alive").output == "alive\n"


def test_memory_that_forks_share_counts_once(small: Sandbox) -> None:
    code = "import os, time; held = b'1' * (90 << 20); [os.fork() for _ in range(3)]; time.sleep(0.5)"
    result = small.run(f'python3 -c "{code}"; echo done', 30)
    assert (result.output, result.limit) == ("done\n", "")


def test_memory_in_the_background(small: Sandbox) -> None:
    small.run(f'for i in 1 2 3 4; do python3 -c "{HOLD.format(mb=80, s=99)}" > /dev/null & done')
    patience = time.monotonic() + 30.0
    while not (result := small.run("pgrep -c python3")).limit and time.monotonic() < patience:
        time.sleep(0.1)
    assert result.limit == "more than 200 MB of memory"
    assert small.run("pgrep -c python3").output == "1\n"  # the process in charge


def test_processes(small: Sandbox) -> None:
    code = "import subprocess\nn = 0\ntry:\n  while n < 99: subprocess.Popen(['sleep', '9']); n += 1\nfinally: print(n)"
    started = int(small.run(f'python3 -c "{code}" 2> /dev/null').output)
    assert 30 <= started < 40
    assert small.run("pkill sleep; sleep 0.3; echo again").output == "again\n"


def test_disk_and_files(small: Sandbox) -> None:
    for place in ("~", "/tmp"):
        fill = f"cd {place}; for i in 1 2 3 4 5 6 7 8 9; do head -c 5M /dev/zero > f$i || break; done; cat f* | wc -c; rm f*"
        assert small.run(fill).output == f"head: error writing 'standard output': No space left on device\n{32 << 20}\n"
    assert small.run("head -c 9M /dev/zero > big; stat -c %s big; rm big").output.splitlines()[-1] == str(8 << 20)


def test_number_of_files(small: Sandbox) -> None:
    code = "import os\nfor i in range(10**6): os.close(os.open(str(i), os.O_CREAT))"
    result = small.run(f'mkdir many; cd many; python3 -c "{code}"', 60)
    assert (result.exit_code, result.limit) == (137, "more than 100000 files in /work")


def test_cpu() -> None:
    with Sandbox(limits=Limits(cpu_s=1)) as sandbox:
        assert sandbox.run("nproc").output == "1\n"
        start = time.monotonic()
        assert sandbox.run("(while :; do :; done)", 60).exit_code == 137
        assert time.monotonic() - start < 30.0


def test_the_episode_ends() -> None:
    with Sandbox(limits=Limits(episode_s=1.0)) as sandbox, pytest.raises(SandboxError, match="the 1 s of the episode are over") as caught:
        sandbox.run("sleep 100", 60)
    assert caught.value.verdict == "timeout"
    with Sandbox(limits=Limits(episode_s=0.3)) as sandbox:
        time.sleep(1.0)
        with pytest.raises(SandboxError, match="over"):
            sandbox.run("echo too late")


def test_files_are_put(shared: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/tool").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "tree/deep/tool").chmod(0o750)
    (tmp_path / "tree/left").write_text("out")
    shared.run("ln -s /etc/passwd link")
    shared.put({"x/y.txt": b"text", "link": b"new"})
    shared.put_tree(tmp_path / "tree", "/tmp/tree", leave_out=("left",))
    assert shared.run("cat x/y.txt link; stat -c '%a %s' /tmp/tree/deep/tool; ls /tmp/tree").output == "textnew750 256000\ndeep\n"
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(ValueError, match="relative"):
            shared.put({name: b""})
    with pytest.raises(SandboxError, match="Read-only"):
        shared.put({"x": b""}, "/usr/lib")
    assert shared.run("echo still here").output == "still here\n"


def test_grading(tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text(
        "pwd; cat /tests/data; cut -f 6 /logs/verifier/processes.txt; echo 0.5 > /logs/verifier/reward.txt; exit 4"
    )
    (tmp_path / "data").write_text("42\n")
    with Sandbox() as sandbox:
        sandbox.run("cd /tmp; sleep 1234 & (sleep 4321 &) ; until [ $(pgrep -cx sleep) = 2 ]; do :; done")
        grade = sandbox.grade(tmp_path)
        assert (grade.result.exit_code, grade.reward_text) == (4, "0.5\n")
        assert sorted(grade.result.output.splitlines()) == sorted(["/work", "42", "sleep 1234", "sleep 4321"])
        with pytest.raises(AssertionError, match="nothing of the agent"):
            sandbox.run("cat /tests/data")
        with pytest.raises(AssertionError, match="once"):
            sandbox.grade(tmp_path)


def test_late_tests(tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text("sleep 100")
    with Sandbox() as sandbox:
        grade = sandbox.grade(tmp_path, timeout_s=0.5)
    assert (grade.result.timed_out, grade.reward_text) == (True, None)


def test_closing_leaves_no_descriptor_and_no_process() -> None:
    before = len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox()
    sandbox.run("(setsid sleep 777 &) ; sleep 777 &")
    child = sandbox._process.pid
    sandbox.close()
    sandbox.close()
    assert len(os.listdir("/proc/self/fd")) == before and not Path(f"/proc/{child}").exists()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("echo")


def test_closing_interrupts_another_thread() -> None:
    sandbox, raised = Sandbox(), []

    def use() -> None:
        with pytest.raises(SandboxError, match="has ended") as caught:
            sandbox.run("sleep 100", 100)
        raised.append(caught.value.verdict)

    thread = threading.Thread(target=use)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    sandbox.close()
    thread.join()
    assert raised == ["infra_error"] and time.monotonic() - start < 5.0


def test_threads_take_turns_and_the_starting_thread_may_end() -> None:
    made: list[Sandbox] = []
    starter = threading.Thread(target=lambda: made.append(Sandbox()))
    starter.start()
    starter.join()
    (sandbox,) = made
    time.sleep(0.2)
    outputs: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: outputs.update({i: sandbox.run(f"echo {i} >> log; sleep 0.02; echo {i}; tail -1 log").output}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sandbox.close()
    assert outputs == {i: f"{i}\n{i}\n" for i in range(8)}


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, shared: Sandbox) -> None:
    with pytest.raises(ValueError, match="NUL"):
        shared.run("echo a\0b")
    with pytest.raises(ValueError, match="timeout_s 0"):
        shared.run("echo", 0)
    with pytest.raises(ValueError, match="one of bubblewrap, docker, apptainer"):
        Sandbox("chroot")
    with pytest.raises(ValueError, match="takes no image"):
        Sandbox(image="debian:12")
    with pytest.raises(ValueError, match="needs an image"):
        Sandbox("docker")
    with pytest.raises(ValueError, match="memory_mb 0"):
        Limits(memory_mb=0)
    monkeypatch.setattr(sandbox_command.shutil, "which", lambda name: None if name == "bwrap" else f"/bin/{name}")
    with pytest.raises(ValueError, match="no bwrap here; install the package bubblewrap"):
        Sandbox()


def test_a_sandbox_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_core.tasks.sandbox.build", lambda *_: (["sh", "-c", "echo no namespaces here >&2; exit 1"], []))
    with pytest.raises(SandboxError, match="has ended: no namespaces here") as caught:
        Sandbox()
    assert caught.value.verdict == "infra_error"


def test_command_lines_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_command.shutil, "which", lambda name: name)
    limits = Limits(cpus=2, memory_mb=300, processes=9, disk_mb=7)
    command = " ".join(build("docker", limits, False, "debian:12", "m1")[0])
    for words in (
        "docker run --rm --interactive --name m1 --read-only",
        "--network none --cap-drop ALL --security-opt no-new-privileges",
        "--memory 300m --memory-swap 300m --cpus 2 --pids-limit 9",
        "--tmpfs /work:rw,exec,nosuid,nodev,uid=65534,gid=65534,mode=755,size=7m",
    ):
        assert words in command, words
    assert command.endswith(" debian:12")
    assert "--network bridge" in " ".join(build("docker", limits, True, "debian:12", "m1")[0])
    command = " ".join(build("apptainer", limits, False, "a.sif", "m2")[0])
    for words in (
        "apptainer exec --containall --no-home",
        "--net --network none --memory 300M --cpus 2 --pids-limit 9",
        "--scratch /tests",
    ):
        assert words in command, words
    assert command.endswith("--pwd /work a.sif")
