"""Process 1 of a sandbox: starts shells, copies files in, keeps the limits that the kernel does not. Runs inside, on the standard library.

    sandbox.py sends this text to a `python3 -I -S` in a PID namespace of its own: nothing of the project need exist in there.

Replies go to stdout: a line with a Python literal, and as many bytes as its `size` says. The first is {"ready": True}; then a line of
limits is read from stdin, and then requests in the same form: run (a command in the episode's shell, or a program), put (files), seal
(end of the agent's part), read. Each has one reply; a failed one is {"error": text}.

The agent has the same user id as this process. What keeps it out: this is process 1, so signals from inside that have no handler are
dropped; it is not dumpable, so nobody opens its memory and descriptors; its children inherit none of its pipes. When it ends, the kernel
kills everything in the namespace, and it ends with its stdin: that is, with the harness, however the harness ends.
"""

from __future__ import annotations

import _ctypes  # this module is read at every start: with json, ctypes, signal and contextlib that takes 20 ms longer
import _signal as signal
import os
import resource
import select
import time

TICK_S = 0.1  # how often memory and files are looked at. One core fills at most a few 100 MB in that time
MAX_FILES = 100_000  # in one of the writable directories: empty files take memory of the kernel, and no space of a tmpfs
WRITABLE = ("/work", "/tmp", "/dev/shm", "/tests", "/logs", "/solution")
_KILL_PATIENCE_S = 0.3
_PR_SET_DUMPABLE = 4  # linux/prctl.h
# A command is run with `$?` of the one before. It inherits neither descriptor 3 (commands) nor 4 (their exit codes).
_SHELL = (
    """__r() { return "$1"; }; __s=0; while IFS= read -r -d '' -u 3 __c; do """
    """__r $__s; eval "$__c" 3<&- 4>&-; __s=$?; printf '%d\\0' $__s >&4; done"""
)


class Quiet:
    """contextlib.suppress."""

    def __init__(self, *kinds: type[OSError]):
        self.kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.kinds)


def pids() -> list[int]:
    """Every process but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def read_text(path: str) -> str:
    """A file of /proc; "" when the process is gone, or hides it."""
    with Quiet(OSError), open(path, "rb") as file:
        return file.read().decode(errors="replace")
    return ""


def kb(text: str, *fields: str) -> int:
    """The sum of lines `Name:   123 kB`."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.partition(":")[0] in fields)


def memory_kb(limit_kb: int) -> int:
    """Memory of all processes. Pages that forks share are counted once: that is slow, and only done where the simple sum is too much."""
    total = sum(kb(read_text(f"/proc/{pid}/status"), "RssAnon", "RssShmem", "VmSwap") for pid in pids())
    if total <= limit_kb:
        return total
    total = 0
    for pid in pids():
        exact = read_text(f"/proc/{pid}/smaps_rollup")
        fields = ("Pss_Anon", "Pss_Shmem", "SwapPss") if exact else ("RssAnon", "RssShmem", "VmSwap")
        total += kb(exact or read_text(f"/proc/{pid}/status"), *fields)
    return total


def too_many_files() -> str:
    counts = {path: os.statvfs(path) for path in WRITABLE}
    return " and ".join(path for path, count in counts.items() if count.f_files - count.f_ffree > MAX_FILES)


def wipe(top: str) -> None:
    """Empty a directory whatever is in it: depth does not matter, since what lies deep is moved up first, nor do modes."""
    count = 0
    os.chmod(top, 0o755)
    while entries := list(os.scandir(top)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for child in os.scandir(entry.path):
                if child.is_dir(follow_symlinks=False):
                    os.chmod(child.path, 0o700)  # moving a directory writes into it
                while os.path.lexists(f"{top}/.{count}"):
                    count += 1
                os.rename(child.path, f"{top}/.{count}")
            os.rmdir(entry.path)


def read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(size - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def read_line() -> dict:
    line = bytearray()
    while not line.endswith(b"\n"):
        line += read_exactly(1)
    return eval(line.decode())  # it comes from the harness


def read_some(descriptor: int) -> bytes | None:
    """What lies in a pipe; b"" at its end, None while it is empty."""
    with Quiet(BlockingIOError):
        return os.read(descriptor, 1 << 16)
    return None


def reply(message: dict, payload: bytes = b"") -> None:
    data = repr({**message, "size": len(payload)}).encode() + b"\n" + payload
    while data:
        data = data[os.write(1, data) :]


class Output:
    """What a command printed: the first and the last bytes of it, and how many were left out between."""

    def __init__(self, limit: int):
        self.half, self.head, self.tail, self.omitted = limit // 2, bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        excess = max(len(self.tail) - self.half, 0)
        del self.tail[:excess]
        self.omitted += excess

    def take(self, descriptor: int) -> bool:
        """Add what lies in a pipe; False at its end."""
        data = read_some(descriptor)
        self.add(data or b"")
        return data != b""


class Program:
    """A bash with its output in a pipe: the shell of the episode, or one with arguments."""

    def __init__(self, limits: dict, cwd: str, env: dict, argv: list[str] | None = None):
        commands, self.commands = os.pipe()
        self.status, status = os.pipe()
        self.output, output = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(limits, cwd, env, argv, commands, status, output)
            finally:
                os._exit(127)
        for end in (commands, status, output):
            os.close(end)
        self.pidfd = os.pidfd_open(self.pid)
        for end in (self.commands, self.status, self.output):
            os.set_blocking(end, False)  # a process inside may read a pipe empty under us, or stop the shell

    @staticmethod
    def _become(limits: dict, cwd: str, env: dict, argv: list[str] | None, commands: int, status: int, output: int) -> None:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and programs would inherit that
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for source, target in ((output, 1), (output, 2), *([] if argv else [(commands, 3), (status, 4)])):
            os.dup2(source, target)
        most = {"NPROC": limits["processes"], "DATA": limits["memory_mb"] << 20, "FSIZE": limits["file_mb"] << 20, "CPU": limits["cpu_s"]}
        for name, value in {**most, "NOFILE": 512, "CORE": 0, "MSGQUEUE": 0, "SIGPENDING": 1024}.items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        with Quiet(OSError):  # gone, or closed to us: the shell begins at home
            os.chdir(cwd)
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", *(argv or ["-c", _SHELL])], env)

    def close(self) -> None:
        for descriptor in (self.commands, self.status, self.output, self.pidfd):
            os.close(descriptor)


class Init:
    def __init__(self, limits: dict):
        self.limits = limits
        self.end = time.monotonic() + limits["episode_s"]
        self.shell: Program | None = None
        self.cwd = "/work"
        self.ended: dict[int, int] = {}  # children that ended: pid -> exit code
        self.broken = ""  # the limit for which everything was killed, until it is told

    def serve(self) -> None:
        waiting = select.poll()
        waiting.register(0, select.POLLIN)
        while True:
            self.reap()
            idle = all(self.shell is not None and pid == self.shell.pid for pid in pids())
            left = max(self.end - time.monotonic(), 0)
            if waiting.poll(1000 * (left if idle else min(TICK_S, left)) + 1):
                request = read_line()
                payload = read_exactly(request.get("size", 0))
                try:
                    getattr(self, "do_" + request["op"])(request, payload)
                except OSError as error:
                    reply({"error": f"{request['op']}: {error}"})
            self.tick()

    def tick(self) -> None:
        """Reap, and look at the limits that the kernel does not keep. Over one of them, everything is killed."""
        self.reap()
        if time.monotonic() >= self.end:
            reply({"over": True})
            os._exit(0)
        limit_kb = self.limits["memory_mb"] << 10
        if memory_kb(limit_kb) > limit_kb:
            self.kill_all(f"more than {self.limits['memory_mb']} MB of memory")
        elif path := too_many_files():
            self.kill_all(f"more than {MAX_FILES} files in {path}")

    def reap(self) -> None:
        with Quiet(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.ended[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def kill_all(self, reason: str = "") -> None:
        """Kill everything but this process, and wait until it is gone."""
        self.broken = reason or self.broken
        self.remember_cwd()
        patience = time.monotonic() + 5.0
        while pids() and time.monotonic() < patience:
            with Quiet(ProcessLookupError):  # they ended between the two lines
                os.kill(-1, signal.SIGKILL)
            time.sleep(0.002)
            self.reap()

    def remember_cwd(self) -> None:
        """A new shell begins where the last one was."""
        if self.shell is not None:
            with Quiet(OSError):  # it has ended: where it was last seen
                self.cwd = os.readlink(f"/proc/{self.shell.pid}/cwd")

    def do_run(self, request: dict, payload: bytes) -> None:
        """{"timeout_s", "env"} and a command as payload, or {"argv"}: a bash apart from the shell, in `cwd`."""
        self.reap()
        if self.shell is not None and self.shell.pid in self.ended:
            self.drop_shell()  # it was killed between two commands
        if "argv" in request:
            program = Program(self.limits, request["cwd"], request["env"], request["argv"])
        else:
            program = self.shell = self.shell or Program(self.limits, self.cwd, request["env"])
        output = Output(self.limits["output_bytes"])
        others = set(pids()) - {program.pid}
        command = b"" if "argv" in request else payload + b"\0"
        code, timed_out = self.follow(program, command, output, time.monotonic() + request["timeout_s"], others)
        output.take(program.output)  # all of it: a pipe holds as much as one read takes
        gone = program.pid in self.ended
        if gone and program is self.shell:
            self.drop_shell()
        elif "argv" in request:
            program.close()
        self.ended.clear()
        told = {"exit_code": code, "timed_out": timed_out, "shell_ended": gone and "argv" not in request, "limit": self.broken}
        reply({**told, "omitted": output.omitted, "head": len(output.head)}, bytes(output.head + output.tail))
        self.broken = ""

    def drop_shell(self) -> None:
        if self.shell is not None:
            self.shell.close()
            self.shell = None

    def follow(self, program: Program, command: bytes, output: Output, deadline: float, others: set[int]) -> tuple[int, bool]:
        """Hand the command over and collect output until it ends, one way or another -> (exit code, timed out)."""
        waiting = select.poll()
        for descriptor in (0, program.output, program.status, program.pidfd):
            waiting.register(descriptor, select.POLLIN)
        if command:
            waiting.register(program.commands, select.POLLOUT)
        next_tick = time.monotonic() + TICK_S
        while True:
            now = time.monotonic()
            if now >= next_tick:
                self.tick()
                next_tick = now + TICK_S
            if now >= deadline:
                self.stop(program, others)
                return 124, True
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * max(min(next_tick, deadline) - now, 0) + 1)}
            if 0 in ready:
                os._exit(0)  # the harness says nothing while it waits, so this is its end
            if program.commands in ready:
                with Quiet(BrokenPipeError, BlockingIOError):  # the shell has ended: that is seen below
                    command = command[os.write(program.commands, command) :]
                if not command:
                    waiting.unregister(program.commands)
            if program.output in ready and not output.take(program.output):
                waiting.unregister(program.output)  # everyone closed it
            if program.status in ready:
                text = read_some(program.status)
                if text and text.endswith(b"\0"):  # 255: the agent wrote into this pipe, and fools itself
                    return (int(text[:-1]) if text[:-1].isdigit() else 255), False
                if text == b"":
                    waiting.unregister(program.status)
            self.reap()
            if program.pid in self.ended:
                code = self.ended[program.pid]
                return (128 - code if code < 0 else code), False

    def stop(self, program: Program, others: set[int]) -> None:
        """After a time-out: kill the program and what it started. Where that does not end, as in a fork bomb, kill everything."""
        self.remember_cwd()
        patience = time.monotonic() + _KILL_PATIENCE_S
        while late := [pid for pid in pids() if pid not in others]:
            if time.monotonic() > patience:
                self.kill_all()
                break
            for pid in late:
                with Quiet(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            self.reap()
        self.reap()

    def do_put(self, request: dict, payload: bytes) -> None:
        """{"dest", "files": [[path, mode, size], ...]} and their bytes. Nothing is written through a link that lies there."""
        at = 0
        for path, mode, size in request["files"]:
            path = os.path.join(request["dest"], path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.lexists(path):
                os.unlink(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(payload[at : at + size])
                os.fchmod(descriptor, mode)
            at += size
        reply({})

    def do_seal(self, request: dict, payload: bytes) -> None:
        """Before grading: list the processes, kill them, and empty the directories of the tests, whatever the agent left there."""
        lines = []
        for pid in pids():
            if self.shell is None or pid != self.shell.pid:
                lines += describe(pid)
        self.kill_all()
        assert not pids(), f"processes that do not end: {pids()}"
        self.drop_shell()
        wipe("/tests")
        wipe("/logs")
        os.mkdir("/logs/verifier")
        with open("/logs/verifier/processes.txt", "w") as file:
            file.writelines(lines)
        reply({})

    def do_read(self, request: dict, payload: bytes) -> None:
        """{"path", "limit"} -> {"found"} and at most `limit` bytes of a regular file."""
        if not os.path.isfile(request["path"]) or os.path.islink(request["path"]):
            reply({"found": False})
            return
        with open(request["path"], "rb") as file:
            reply({"found": True}, file.read(request["limit"]))


def describe(pid: int) -> list[str]:
    """A process as a line `pid, parent, session, state, program, command line`, with tabs between; none if it has ended."""
    stat = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not stat or stat[0] == "Z":
        return []
    program = "?"
    with Quiet(OSError):
        program = os.readlink(f"/proc/{pid}/exe")
    command = read_text(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")
    return ["\t".join((str(pid), stat[1], stat[3], stat[0], program, " ".join(command.split()))) + "\n"]


def main() -> None:
    assert os.getpid() == 1, "this is process 1 of a sandbox: miles_core/tasks/sandbox.py starts it"
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # for all in here: a machine short of memory ends a sandbox, not the job
    assert _ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"), (_PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    os.closerange(3, 1024)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no handler: so `kill -INT 1` is dropped
    while os.open(os.devnull, os.O_RDONLY) < 8:
        pass  # pipes get higher numbers than the descriptors that a child is given
    os.umask(0o022)
    os.nice(10)  # the ranks of the job come first
    reply({"ready": True})
    Init(read_line()).serve()


if __name__ == "__main__":
    main()
