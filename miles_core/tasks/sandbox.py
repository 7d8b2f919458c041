"""A sandbox for one episode: a shell that lives as long as it, files, limits, and nothing left behind.

    with Sandbox() as sandbox:                                     # or backend="docker", image="debian:12"
        sandbox.put({"notes.txt": b"hello"})
        result = sandbox.run("cd /tmp && wc -c < ~/notes.txt")     # Result(exit_code=0, output="5\\n", timed_out=False)
        grade = sandbox.grade("path/to/tests")                     # runs its test.sh; the agent's part is over

Inside: home is /work; the system is read-only; no network unless asked for. Commands run one after the other in one bash, so the directory
and variables stay. The shell is replaced (same directory, variables lost) when a command times out, ends it, or breaks a limit; the output
says so. `Limits` are per episode, but for `cpu_s` and `file_mb`. What no limit covers is memory of the kernel for sockets and pipes.

With `network=True` the episode uses the host's network, and reaches services on its loopback address.

An instance may be used from several threads: calls wait for each other, and `close` interrupts. How it holds: see `sandbox_command.py`
(namespaces, filter of system calls) and `sandbox_init.py` (the process in charge inside).
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.tasks.sandbox_command import Limits, build

__all__ = ["Grade", "Limits", "Result", "Sandbox", "SandboxError"]
START_TIMEOUT_S = 30.0
_GRACE_S = 10.0  # what the process inside gets beyond a deadline that it keeps itself
_MAX_MESSAGE = 1 << 16  # bytes of a reply's first line
_REWARD_BYTES = 64
_INIT = (Path(__file__).parent / "sandbox_init.py").read_bytes()
# Reads the program from stdin. Nothing else may be sent before it has answered: the buffer would take it.
_BOOT = f"exec(open(0, 'rb', closefd=False).read({len(_INIT)}))"
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/work", "USER": "agent", "LOGNAME": "agent"}
_ENV |= {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "TZ": "UTC", "SHELL": "/bin/bash"}
_GUARD = {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_GUARD |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CONFIG_COUNT": "2"}
_GUARD |= {"GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": "false"}
_GUARD |= {"GIT_CONFIG_KEY_1": "core.hooksPath", "GIT_CONFIG_VALUE_1": os.devnull}
_number = itertools.count()


class SandboxError(RuntimeError):
    """The sandbox did not do its part. `verdict` (DESIGN 4.9): `timeout` when the episode's time is over, else `infra_error`."""

    def __init__(self, message: str, verdict: str = "infra_error"):
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class Result:
    """How a command ended. `output` is stdout and stderr as they came, the middle left out where it is long, and our notes in [brackets].

    `exit_code` is 124 after a time-out, 128 + n after signal n. `limit` names the limit for which everything in the sandbox was killed.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    limit: str = ""


@dataclass(frozen=True)
class Grade:
    """What the tests said: how test.sh ended, and the text of /logs/verifier/reward.txt, or None if it wrote none."""

    result: Result
    reward_text: str | None


class Sandbox:
    """One episode. Raises ValueError where the machine lacks what the backend needs, SandboxError when it does not start."""

    def __init__(self, backend: str = "bubblewrap", limits: Limits | None = None, network: bool = False, image: str = ""):
        self.limits = limits or Limits()
        self.backend, self.graded = backend, False
        self._name = f"miles-{os.getpid()}-{next(_number)}"
        self._lock = threading.RLock()
        self._process, self._stderr = _spawner().submit(self._spawn, network, image).result()
        try:
            inside = asdict(self.limits)
            if backend != "bubblewrap":
                inside["processes"] = -1  # counted by cgroup; as a limit of the user id it would count all containers together
            self._send(_INIT)
            self._receive(START_TIMEOUT_S)
            self._send(repr(inside).encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def _spawn(self, network: bool, image: str) -> tuple[subprocess.Popen, int]:
        command, files = build(self.backend, self.limits, network, image, self._name)
        stderr = os.memfd_create("stderr")
        command += ["/usr/bin/python3" if self.backend == "bubblewrap" else "python3", "-I", "-S", "-c", _BOOT]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=files,
                bufsize=0,
                cwd="/",
                # Docker's and Apptainer's own programs may need their settings; nothing of it gets inside.
                env={"PATH": _ENV["PATH"]} if self.backend == "bubblewrap" else None,
                start_new_session=True,  # Ctrl-C is for the harness
            )
        finally:
            for descriptor in files:
                os.close(descriptor)
        return process, stderr

    def run(self, command: str, timeout_s: float = 60.0) -> Result:
        """Run a command in the episode's shell. Its stdin is empty. What it leaves in the background goes on running.

        Raises SandboxError when the sandbox has ended, ValueError for a command that bash cannot be given (with a NUL byte).
        """
        if "\0" in command:
            raise ValueError("a command with a NUL byte: bash takes text")
        assert not self.graded, "the tests are in the sandbox now: nothing of the agent may run any more"
        return self._run({"env": _ENV}, command.encode(errors="surrogateescape"), timeout_s)

    def run_script(self, path: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> Result:
        """Run a script that lies inside by a bash of its own, in the home directory."""
        request = {"argv": [path], "cwd": "/work", "env": {**_ENV, **(env or {})}}
        return self._run(request, b"", timeout_s)

    def _run(self, request: dict, payload: bytes, timeout_s: float) -> Result:
        if not timeout_s > 0:
            raise ValueError(f"a command with timeout_s {timeout_s}: it must be positive")
        reply, data = self._ask({"op": "run", "timeout_s": timeout_s, **request}, payload, timeout_s + _GRACE_S)
        output = data[: reply["head"]].decode(errors="replace")
        if reply["omitted"]:
            output += f"\n[{reply['omitted']} bytes left out]\n"
        output += data[reply["head"] :].decode(errors="replace")
        notes = []
        if reply["timed_out"]:
            notes.append(f"[timed out after {timeout_s:g} s: killed]")
        if reply["limit"]:
            notes.append(f"[{reply['limit']}: everything in the sandbox was killed]")
        if reply["shell_ended"]:
            notes.append("[the shell has ended: the next command gets a new one, without the variables of this one]")
        if notes and output and not output.endswith("\n"):
            output += "\n"
        return Result(int(reply["exit_code"]), output + "".join(f"{note}\n" for note in notes), bool(reply["timed_out"]), reply["limit"])

    def put(self, files: Mapping[str, bytes | Path], dest: str = "/work") -> None:
        """Write files into `dest`: relative path inside -> content, or a file of the host, which keeps its mode."""
        entries, contents = [], []
        for name, source in files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"a file {name} for the sandbox: paths are relative and stay inside {dest}")
            contents.append(source if isinstance(source, bytes) else source.read_bytes())
            entries.append([name, 0o644 if isinstance(source, bytes) else source.stat().st_mode & 0o777, len(contents[-1])])
        self._ask({"op": "put", "dest": dest, "files": entries}, b"".join(contents), START_TIMEOUT_S)

    def put_tree(self, directory: str | Path, dest: str = "/work", leave_out: tuple[str, ...] = ()) -> None:
        """Copy the files below a directory of the host, but for those of these relative paths."""
        root = Path(directory)
        files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
        self.put({name: path for name, path in files.items() if name not in leave_out}, dest)

    def grade(self, tests_dir: str | Path, timeout_s: float = 60.0, guard: bool = True) -> Grade:
        """End the agent's part, then copy the tests in and run /tests/test.sh in the home directory. Once per episode.

        Every process of the agent is killed first, so that none reads or changes the tests. What was running is in
        /logs/verifier/processes.txt, a line `pid, parent, session, state, program, command line` each, with tabs between.

        guard: python3 and git, run by the tests, use no modules beside a program or in the home directory, no hooks and no settings.
        Without it, tests may run programs of the agent that import each other, and the agent can get its code run as part of the tests.
        """
        with self._lock:
            assert not self.graded, "an episode is graded once"
            self.graded = True
            self._ask({"op": "seal"}, b"", START_TIMEOUT_S)
            self.put_tree(tests_dir, "/tests")
            result = self.run_script("/tests/test.sh", timeout_s, _GUARD if guard else None)
            reply, data = self._ask({"op": "read", "path": "/logs/verifier/reward.txt", "limit": _REWARD_BYTES}, b"", START_TIMEOUT_S)
        return Grade(result, data.decode(errors="replace") if reply["found"] else None)

    def close(self) -> None:
        """End the episode: every process in it is gone when this returns, and so are its files. A second call does nothing."""
        self._end()
        with self._lock:  # another thread may still be reading: it has just been told the end
            if self._stderr >= 0:
                os.close(self._stderr)
                self._process.stdout.close()
                self._stderr = -1

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # bubblewrap's --die-with-parent takes the inside along
            self._process.wait()
            if self.backend == "docker":
                subprocess.run(["docker", "kill", self._name], capture_output=True, timeout=_GRACE_S)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict, payload: bytes, timeout_s: float) -> tuple[dict, bytes]:
        with self._lock:
            self._send(repr({**request, "size": len(payload)}).encode() + b"\n" + payload)
            reply, data = self._receive(timeout_s)
        if "error" in reply:
            raise SandboxError(f"sandbox {self._name}: {reply['error']}")
        return reply, data

    def _send(self, data: bytes) -> None:
        if self._process.stdin.closed:
            raise SandboxError(f"sandbox {self._name} is closed")
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # it has ended; `_receive` reads why
            while view:
                view = view[self._process.stdin.write(view) :]

    def _receive(self, timeout_s: float) -> tuple[dict, bytes]:
        """One reply. Anything that is none, or comes late, ends the sandbox."""
        deadline = time.monotonic() + timeout_s
        data = bytearray()
        while b"\n" not in data:
            data += self._read(deadline)
            if len(data) > _MAX_MESSAGE + self.limits.output_bytes:
                self._fail("says too much")
        line, _, rest = bytes(data).partition(b"\n")
        reply = ast.literal_eval(line.decode())
        if "over" in reply:
            self.close()
            raise SandboxError(f"sandbox {self._name}: the {self.limits.episode_s:g} s of the episode are over", "timeout")
        rest = bytearray(rest)
        while len(rest) < reply["size"]:
            rest += self._read(deadline)
        return reply, bytes(rest)

    def _read(self, deadline: float) -> bytes:
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            self._fail("does not answer")
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._fail("has ended")
        return data

    def _fail(self, what: str) -> None:
        self._end()
        said = os.pread(self._stderr, 2000, 0).decode(errors="replace").strip()
        self.close()
        raise SandboxError(f"sandbox {self._name} {what}" + (f": {said}" if said else ""))


_spawner_of: dict[int, ThreadPoolExecutor] = {}


def _spawner() -> ThreadPoolExecutor:
    """The thread that starts every sandbox of this process: one is killed when the *thread* that started it ends, and this one stays."""
    if os.getpid() not in _spawner_of:  # also after a fork, which does not copy threads
        _spawner_of.clear()
        _spawner_of[os.getpid()] = ThreadPoolExecutor(1, "sandbox")
    return _spawner_of[os.getpid()]
