"""What an episode must not reach or leave behind: host files, secrets, other episodes, the network, the tests before grading, daemons.

    python -m pytest tests/core/test_sandbox_escape.py

Each attack is also run where it must succeed (on the host, or with the permission given), or counts what it reached: an attack that is
broken fails here too. Needs Debian's packages bubblewrap and util-linux.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.tasks.sandbox import Limits, Sandbox
from miles_core.tasks.sandbox_command import UID

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def inside() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def python(sandbox: Sandbox, code: str, timeout_s: float = 60.0) -> str:
    """Run a program inside; what it prints, without the last newline."""
    sandbox.put({"attack.py": code.encode()})
    return sandbox.run("python3 ~/attack.py 2>&1", timeout_s).output.removesuffix("\n")


def running(token: str) -> list[int]:
    """Processes of this machine whose command line has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if token.encode() in words:
            found.append(int(path.parent.name))
    return found


def wait_until_gone(token: str, patience_s: float = 10.0) -> bool:
    end = time.monotonic() + patience_s
    while running(token):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def daemon(token: str) -> str:
    """A command that leaves a process called `token`: in a session of its own, not a child of the shell, deaf to polite signals."""
    start = f"(setsid bash -c 'trap \"\" HUP TERM INT; exec -a {token} sleep 1000' > /dev/null 2>&1 &)"
    return f"{start}; until pgrep -f '^{token}' > /dev/null; do sleep 0.02; done"


def token() -> str:
    return "t" + uuid.uuid4().hex


def test_host_files(inside: Sandbox, tmp_path: Path) -> None:
    secret = token()
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "secret").chmod(0o666)
    for path in (tmp_path / "secret", Path("/etc/shadow"), Path("/etc/machine-id"), ROOT / "train.py", Path.home()):
        result = inside.run(f"cat '{path}' 2>&1 || ls '{path}'")
        assert result.exit_code != 0 and "No such file" in result.output, path
    assert Path("/etc/shadow").exists() and (ROOT / "train.py").exists()
    assert inside.run("ls -A /").output.split() == sorted("bin dev etc lib lib64 logs proc sbin solution tests tmp usr var work".split())
    assert inside.run(f"grep -rsl {secret} / --exclude-dir=usr --exclude-dir=proc --exclude-dir=dev", 120).output == ""


def test_secrets_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = token()
    monkeypatch.setenv("API_KEY", secret)
    with Sandbox() as sandbox:
        assert "HOME=/work" in sandbox.run("env").output
        assert secret not in sandbox.run("env; cat /proc/[0-9]*/environ; cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
        grade = sandbox.run("ls -l /proc/*/fd 2> /dev/null | grep -v -e /dev/null -e pipe: -e /proc -e total -e '^$'")
        assert grade.output == "", "a descriptor of the harness"


def test_who_we_are(inside: Sandbox) -> None:
    status = dict(line.split(":\t", 1) for line in inside.run("cat /proc/self/status").output.splitlines())
    assert [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [0] * 5
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    mark = token()
    inside.run(daemon(mark))
    (outside,) = running(mark)
    owner = os.stat(f"/proc/{outside}").st_uid
    assert owner == (UID if os.geteuid() == 0 else os.geteuid())
    for kind in ("user", "pid", "net", "mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{outside}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    inside.run(f"pkill -9 -f {mark}")


def test_the_system_is_read_only(inside: Sandbox) -> None:
    for path in ("/usr/bin/evil", "/etc/evil", "/evil", "/dev/evil", "/lib/evil", "/var/evil"):
        result = inside.run(f"echo x > {path}")
        assert result.exit_code != 0 and "Read-only file system" in result.output, path
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj"):
        assert inside.run(f"echo -1000 > {path}").exit_code != 0, path
    assert inside.run("echo x > /dev/null && echo x > ~/mine && echo x > /dev/shm/mine").exit_code == 0
    devices = "console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
    assert set(inside.run("ls /dev").output.split()) <= set(devices)
    assert inside.run("mknod ~/disk b 8 0").exit_code != 0


CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments), ctypes.get_errno()
"""


def test_system_calls(inside: Sandbox) -> None:
    code = CALLS + "print(call(39)[0] > 0, [call(n, 0, 0, 0, 0, 0) for n in (101, 310, 319, 29, 165, 272, 308, 321, 298, 425, 203, 428)])"
    assert python(inside, code) == f"True {[(-1, 1)] * 12}"
    code = "import errno, socket\nfor family in (1, 2, 10, 16, 17, 38, 40):\n  try: socket.socket(family, 2); print(family, 'open')\n"
    code += "  except OSError as e: print(family, errno.errorcode[e.errno])"
    expected = [f"{n} open" for n in (1, 2, 10, 16)] + [f"{n} EAFNOSUPPORT" for n in (17, 38, 40)]
    assert python(inside, code).split("\n") == expected
    # clone(CLONE_NEWUSER | SIGCHLD), where a new namespace would bring capabilities, and the calls of 32-bit programs and of x32.
    assert python(inside, CALLS + "print(call(56, 0x10000011, 0, 0, 0, 0)[0])").splitlines()[-1] == "-1"
    assert inside.run("unshare -Ur true").exit_code != 0 and inside.run("su -c true; mount -t tmpfs x /tmp").exit_code != 0
    x32 = inside.run("python3 -c 'import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)'")
    assert x32.exit_code == 128 + signal.SIGSYS


@pytest.mark.parametrize("network", [False, True])
def test_network(network: bool) -> None:
    name = "\0" + token()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract, Sandbox(network=network) as sandbox:
        abstract.bind(name)
        abstract.listen()
        code = "import socket\nfor f, a in ((2, ('127.0.0.1', {port})), (1, {name!r})):\n  s = socket.socket(f)\n  s.settimeout(5)\n"
        code += "  try: s.connect(a); print('reached')\n  except OSError as e: print('refused')\n"
        word = "reached" if network else "refused"
        assert python(sandbox, code.format(port=server.getsockname()[1], name=name)) == f"{word}\n{word}"
        if not network:
            assert sandbox.run("cut -d : -f 1 -s /proc/net/dev").output.split() == ["lo"]
            assert "unreachable" in python(sandbox, "import socket\nsocket.create_connection(('1.1.1.1', 53), 3)").lower()


def test_other_episodes() -> None:
    mark = token()
    with Sandbox() as one, Sandbox() as other:
        one.run(f"echo {mark} | tee ~/f /tmp/f /dev/shm/f /logs/f /solution/f; hostname x; {daemon(mark)}")
        assert mark in one.run(f"grep -rl {mark} ~ /tmp /dev/shm; ps aux").output
        assert other.run(f"grep -rs {mark} /work /tmp /dev/shm /logs /solution /proc/[0-9]*/environ /proc/[0-9]*/cmdline").output == ""
        assert other.run("set -- /proc/[0-9]*; echo $#").output == "2\n"  # the process in charge and this shell
        (outside,) = running(mark)
        assert other.run(f"kill -9 {outside}").exit_code == 1 and other.run("kill -9 -1").exit_code != 0
        assert running(mark) == [outside]
        assert one.run("pgrep -c sleep").output == "1\n"


def test_fork_bomb() -> None:
    with Sandbox(limits=Limits(processes=50)) as sandbox:
        start = time.monotonic()
        result = sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 60", 3.0)
        assert result.timed_out and time.monotonic() - start < 20.0
        assert sandbox.run("set -- /proc/[0-9]*; echo $#").output == "2\n"  # the process in charge and this shell
        code = "import os, time\nn = 0\nwhile True:\n  try: pid = os.fork()\n  except OSError: print(n, flush=True); break\n"
        code += "  if pid == 0: os.setsid(); time.sleep(99)\n  n += 1"
        most = int(python(sandbox, code, 30.0).split()[0])
        assert 40 <= most < 50
        assert subprocess.run(["true"]).returncode == 0


def test_disk_fill() -> None:
    with Sandbox(limits=Limits(disk_mb=16, file_mb=64)) as sandbox:
        command = (
            "for d in ~ /tmp /dev/shm /tests /logs /solution /var/tmp; do head -c 80M /dev/zero > $d/fill; done; du -cm --apparent-size"
        )
        places = "~ /tmp /dev/shm /tests /logs /solution"
        assert set(sandbox.run(f"stat -f -c %T {places}").output.split()) == {"tmpfs"}  # nothing of it is on a disk of the host
        output = sandbox.run(f"{command} {places}", 60).output
        total_mb = int(output.splitlines()[-1].split()[0])
        assert 16 + 16 + 3 * 64 + 16 <= total_mb <= 250 and output.count("No space left on device") >= 3
        assert sandbox.run("echo x > ~/more").exit_code != 0
        assert sandbox.run("rm -f ~/fill /tmp/fill; echo x > ~/more && cat ~/more").output == "x\n"


def test_daemons_end_with_the_episode() -> None:
    mark = token()
    with Sandbox() as sandbox:
        sandbox.run(daemon(mark))
        assert running(mark)
    assert running(mark) == []


HARNESS = """
import multiprocessing, os, sys, time
from miles_core.tasks.sandbox import Sandbox
sandbox = Sandbox()
if sys.argv[2] == "forked":  # a process that holds copies of the pipes, and lives on
    if os.fork() == 0:
        time.sleep(15)
        os._exit(0)
sandbox.run(sys.argv[1])
print("ready", flush=True)
sandbox.run("sleep 1000", 1000) if sys.argv[2] == "busy" else time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["idle", "busy", "forked"])
def test_killing_the_harness(how: str) -> None:
    mark = token()
    command = [sys.executable, "-c", HARNESS, daemon(mark), how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as harness:
        assert harness.stdout is not None and harness.stdout.readline() == b"ready\n"
        assert len([pid for pid in running(mark) if os.stat(f"/proc/{pid}").st_uid != 0 or os.geteuid()]) == 1
        os.kill(harness.pid, signal.SIGKILL)
        assert wait_until_gone(mark), "the episode outlives its harness"
        if how == "forked":
            os.killpg(harness.pid, signal.SIGKILL)


def test_the_process_in_charge(inside: Sandbox) -> None:
    inside.run("for s in KILL STOP INT TERM HUP QUIT USR1 SEGV ALRM CHLD PIPE; do kill -$s 1; done")
    assert inside.run("echo alive").output == "alive\n"
    for path in ("mem", "environ", "fd/0", "fd/1", "cwd/.", "root/.", "exe", "auxv", "map_files/."):
        result = inside.run(f"cat /proc/1/{path}")
        assert result.exit_code != 0 and "Permission denied" in result.output, path
    assert inside.run("cat /proc/$$/environ > /dev/null").exit_code == 0
    forged = '{"exit_code": 0, "timed_out": false, "shell_ended": false, "limit": "", "omitted": 0, "head": 0, "size": 0}'
    inside.run(f"for d in /proc/[0-9]*/fd/*; do [ $d -ef /proc/1/fd/1 ] && echo '{forged}' > $d; done")
    inside.run(f"for i in 1 3 4 5 6 7 8 9 10 11 12 13; do echo '{forged}' >&$i; done 2> /dev/null")
    assert inside.run("exit 9").exit_code == 9
    assert inside.run("echo second; (exit 3)").exit_code == 3
    assert inside.run("nice -n -5 true 2>&1").output.startswith("nice: cannot set niceness")
    assert inside.run("taskset -cp 0-63 $$").exit_code != 0
    assert inside.run("ulimit -u 100000").exit_code != 0


def test_symbolic_links(inside: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("host")
    host = "/proc/1/root"
    inside.run(f"ln -sfn {tmp_path} out; ln -sf {host}/etc/shadow shadow; ln -sf /usr/bin/env tool; ln -sfn / d")
    assert inside.run("cat out/host").exit_code != 0 and inside.run("cat shadow").exit_code != 0
    env = Path("/usr/bin/env").read_bytes()
    inside.put({"tool": b"replaced"})
    assert inside.run("cat tool").output == "replaced" and Path("/usr/bin/env").read_bytes() == env
    for target in ("/tests", "/logs"):
        assert inside.run(f"rmdir {target} || mv {target} /tmp/x || ln -sfnT ~ {target}").exit_code != 0


TESTS = """
cat ~/leak /tmp/leak 2> /dev/null
ls -A /tests
cat /logs/verifier/reward.txt 2> /dev/null
python3 -c 'import json; print(json.__file__)'
cd ~/repository && git status --short
python3 - <<'END'
import sqlite3
print(sqlite3.__file__.startswith("/usr"))
END
exit 1
"""
TRAPS = {
    "json.py": "print('mine')",
    "sqlite3.py": "print('mine')",
    ".local/lib/python3.11/site-packages/usercustomize.py": "open('/logs/verifier/reward.txt', 'w').write('1')",
    ".local/lib/python3.11/site-packages/x.pth": "import os; os.system('echo mine')",
    ".bashrc": "echo mine",
    ".bash_profile": "echo mine",
    ".gitconfig": "[core]\n fsmonitor = echo mine >&2\n[alias]\n status = !echo mine",
    "repository/x": "x",
}


def test_the_tests_before_and_during_grading(tmp_path: Path) -> None:
    mark = token()
    (tmp_path / "test.sh").write_text(TESTS + f"# {mark}\n")
    with Sandbox() as sandbox:
        assert sandbox.run(f"ls -A /tests; grep -rs {mark} /tests /tmp /logs /work").output == ""
        sandbox.put({name: text.encode() for name, text in TRAPS.items()})
        sandbox.run("git init -q repository; git -C repository config core.fsmonitor 'echo mine >&2; echo'")
        sandbox.run("export BASH_ENV=~/.bashrc ENV=~/.bashrc; ls() { echo mine; }; export -f ls; alias ls='echo mine'")
        sandbox.run("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ln -s ~/x /logs/link")
        deep = "import os\nos.chdir('/tests')\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\nopen('/tests/test.sh', 'w')"
        sandbox.put({"deep.py": deep.encode()}, "/tmp")
        assert sandbox.run("python3 -IS /tmp/deep.py").exit_code == 0
        sandbox.run("chmod 000 /tests/d; chmod 000 /logs/verifier /logs /tests")
        for place in ("work", "tmp"):
            spy = f"while :; do cp /tests/test.sh /{place}/leak; echo 1 > /logs/verifier/reward.txt; done"
            sandbox.run(f"(setsid bash -c '{spy}' > /dev/null 2>&1 &)")
        grade = sandbox.grade(tmp_path)
    assert grade.reward_text is None and grade.result.exit_code == 1
    assert grade.result.output.splitlines() == ["test.sh", "/usr/lib/python3.11/json/__init__.py", "?? x", "True"]


def test_nothing_is_left_on_the_host() -> None:
    places = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
    before = {path for place in places for path in place.iterdir()}
    with Sandbox() as sandbox:
        sandbox.run("echo x | tee ~/left /tmp/left /dev/shm/left")
    assert {path for place in places for path in place.iterdir() if path.name == "left" or "bubblewrap" in path.name} - before == set()
