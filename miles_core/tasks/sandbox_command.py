"""The command line that starts a sandbox: bubblewrap, Docker or Apptainer. What it starts is `sandbox_init.py`, read from stdin.

Bubblewrap gets files by descriptor: names for the user, and a filter of system calls. The filter refuses what a namespace does not hold in
(sockets of other families than the internet's and Unix's: a virtual machine's host listens on AF_VSOCK), what takes memory that no process
shows (memfd, System V), and what opens much of the kernel for nothing that a task needs (ptrace, bpf, mounts, io_uring).
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

BACKENDS = ("bubblewrap", "docker", "apptainer")
UID = 65534  # outside, when the harness is root. With bubblewrap's own --uid alone, the files of root would stay readable
_INSIDE = 1000
_SIZES_MB = {"/dev/shm": 64, "/tests": 64, "/logs": 16, "/solution": 64}  # what is no `disk_mb`
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs", "/etc/gai.conf")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types")
_turn = itertools.count(os.getpid())  # of cores; the ranks of a machine do not all begin with the same one

# Numbers of linux/asm/unistd_64.h.
_REFUSED = {
    **dict(ptrace=101, process_vm_readv=310, process_vm_writev=311, pidfd_getfd=438, kcmp=312),
    **dict(memfd_create=319, memfd_secret=447, shmget=29, msgget=68, semget=64, mq_open=240),
    **dict(sched_setaffinity=203, mount=165, umount2=166, pivot_root=155, chroot=161, unshare=272, setns=308),
    **dict(open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433, mount_setattr=442),
    **dict(bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, keyctl=250, add_key=248, request_key=249),
    **dict(open_by_handle_at=304, kexec_load=246, kexec_file_load=320, init_module=175, finit_module=313, delete_module=176, acct=163),
    **dict(swapon=167, swapoff=168, quotactl=179, fanotify_init=300, personality=135),
}
_SOCKET, _FAMILIES = 41, (1, 2, 10, 16)  # socket(2): AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_AUDIT_ARCH_X86_64, _EPERM, _EAFNOSUPPORT = 0xC000003E, 1, 97
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # opcodes of classic BPF


@dataclass(frozen=True)
class Limits:
    """What an episode may use. `episode_s` is wall time, `cpu_s` that of each process; `output_bytes` is what is kept of one command."""

    cpus: int = 1
    memory_mb: int = 1024
    processes: int = 128
    disk_mb: int = 512  # in the home directory, and as much in /tmp. It is memory too, and counts beside `memory_mb`
    file_mb: int = 256
    cpu_s: int = 600
    episode_s: float = 1800.0
    output_bytes: int = 32768

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"a sandbox with {name} {value}: limits are positive")


def call_filter() -> bytes:
    """A program of classic BPF: the refused calls fail with EPERM, other socket families with EAFNOSUPPORT, other ABIs are killed."""
    size = struct.calcsize("HBBI")
    assert size == 8, size

    def line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    def result(value: int) -> bytes:
        return line(_RETURN, value)

    program = [line(_LOAD, 4), line(_IF_EQUAL, _AUDIT_ARCH_X86_64, 1, 0), result(_KILL), line(_LOAD, 0)]
    program += [line(_IF_AT_LEAST, 0x40000000, 0, 1), result(_KILL)]  # the x32 ABI: the same calls under other numbers
    for number in sorted(_REFUSED.values()):
        program += [line(_IF_EQUAL, number, 0, 1), result(_ERRNO | _EPERM)]
    program += [line(_IF_EQUAL, _SOCKET, 1, 0), result(_ALLOW), line(_LOAD, 16)]  # 16: the low half of the first argument
    for family in _FAMILIES:
        program += [line(_IF_EQUAL, family, 0, 1), result(_ALLOW)]
    return b"".join([*program, result(_ERRNO | _EAFNOSUPPORT)])


def _file(content: bytes) -> int:
    """A descriptor of a file in memory."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _sizes(limits: Limits) -> dict[str, int]:
    """Writable directories -> MB."""
    return {"/work": limits.disk_mb, "/tmp": limits.disk_mb, **_SIZES_MB}


def build(backend: str, limits: Limits, network: bool, image: str, name: str) -> tuple[list[str], list[int]]:
    """(command line up to the program to start, descriptors it reads). Raises ValueError for what is missing on this machine."""
    if backend not in BACKENDS:
        raise ValueError(f"--sandbox {backend}: it is one of {', '.join(BACKENDS)}")
    if backend == "bubblewrap":
        if image:
            raise ValueError(f"--sandbox bubblewrap uses the programs of this machine and takes no image ({image})")
        return bubblewrap(limits, network, as_root=os.geteuid() == 0)
    if not image:
        raise ValueError(f"--sandbox {backend} needs an image that has bash and python3")
    _need({"docker": "docker", "apptainer": "apptainer"}[backend], backend)
    return (docker if backend == "docker" else apptainer)(limits, network, image, name), []


def _need(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise ValueError(f"--sandbox: there is no {program} here; install the package {package} (Debian: apt-get install {package})")
    return found


def bubblewrap(limits: Limits, network: bool, as_root: bool) -> tuple[list[str], list[int]]:
    """Namespaces of its own for users, processes, network, mounts, IPC and host name. Of the host it sees /usr and a few files of /etc."""
    if platform.machine() != "x86_64":
        raise ValueError(f"--sandbox bubblewrap: its filter of system calls is for x86_64, and this machine is {platform.machine()}")
    if tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 14):
        raise ValueError(f"--sandbox bubblewrap needs Linux 5.14, which counts processes per namespace: this is {platform.release()}")
    if not Path("/usr/bin/python3").exists():
        raise ValueError("--sandbox bubblewrap: there is no /usr/bin/python3; install the package python3 (apt-get install python3)")
    cores = sorted(os.sched_getaffinity(os.getpid()))
    first = next(_turn) * limits.cpus
    chosen = {cores[(first + i) % len(cores)] for i in range(limits.cpus)}
    command = [_need("taskset", "util-linux"), "--cpu-list", ",".join(map(str, sorted(chosen)))]
    if as_root:
        command += [_need("setpriv", "util-linux"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    command += [_need("bwrap", "bubblewrap"), "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
    command += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--disable-userns"]
    command += [] if network else ["--unshare-net"]
    command += ["--uid", str(_INSIDE), "--gid", str(_INSIDE), "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if Path(path).is_symlink():
            command += ["--symlink", os.readlink(path), path]
        elif Path(path).is_dir():
            command += ["--ro-bind", path, path]
    for path in _SYSTEM_FILES + (_NETWORK_FILES if network else ()):
        command += ["--ro-bind-try", path, path]
    user = f"agent:x:{_INSIDE}:{_INSIDE}::/work:/bin/bash\n"
    files = [_file(user.encode()), _file(f"agent:x:{_INSIDE}:\n".encode()), _file(b"127.0.0.1 localhost sandbox\n"), _file(call_filter())]
    command += ["--perms", "0644", "--ro-bind-data", str(files[0]), "/etc/passwd"]
    command += ["--perms", "0644", "--ro-bind-data", str(files[1]), "/etc/group"]
    command += ["--proc", "/proc", "--dev", "/dev", "--seccomp", str(files[3])]
    if not network:
        command += ["--perms", "0644", "--ro-bind-data", str(files[2]), "/etc/hosts"]
    for path, size_mb in _sizes(limits).items():
        command += ["--perms", "1777" if path in ("/tmp", "/dev/shm") else "0755", "--size", str(size_mb << 20), "--tmpfs", path]
    return [*command, "--symlink", "../tmp", "/var/tmp", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work", "--"], files


def docker(limits: Limits, network: bool, image: str, name: str) -> list[str]:
    """`docker run`, with limits by cgroup. The container ends with the stdin of its first process."""
    command = ["docker", "run", "--rm", "--interactive", "--name", name, "--read-only", "--workdir", "/work", "--user", f"{UID}:{UID}"]
    command += ["--network", "bridge" if network else "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    command += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m", "--cpus", str(limits.cpus)]
    command += ["--pids-limit", str(limits.processes), "--entrypoint", ""]
    for path, size_mb in _sizes(limits).items():
        command += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,uid={UID},gid={UID},mode=755,size={size_mb}m"]
    return [*command, image]


def apptainer(limits: Limits, network: bool, image: str, name: str) -> list[str]:
    """`apptainer exec`, with limits by cgroup. Its writable directories share one tmpfs, sized by the site's `sessiondir max size`."""
    command = ["apptainer", "exec", "--containall", "--no-home", "--no-privs", "--pid", "--no-init", "--ipc", "--uts"]
    command += [] if network else ["--net", "--network", "none"]
    command += ["--memory", f"{limits.memory_mb}M", "--cpus", str(limits.cpus), "--pids-limit", str(limits.processes)]
    for path in _sizes(limits):
        command += ["--scratch", path]
    return [*command, "--hostname", name, "--pwd", "/work", image]
