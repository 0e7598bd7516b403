"""Lets the package meet what macOS and Windows lack: `pretend("win32")`, in a process that has not imported it yet.

Only imports by modules of streamloader are replaced; other packages see the system that they were built for. So this
shows that the package asks for nothing that is not there, and not how those systems behave.
"""

import builtins
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

POSIX = "fork forkpty register_at_fork geteuid getuid getgid preadv pread pwritev pwrite readv writev fstatvfs statvfs"
POSIX += " sysconf killpg getpgid setsid uname O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY WNOHANG nice chown mkfifo"
LINUX = "memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fadvise copy_file_range eventfd O_DIRECT"
LINUX_ADVICE = "MADV_REMOVE MADV_DONTFORK MADV_HUGEPAGE MAP_POPULATE MAP_NORESERVE"
SIGNALS = "SIGKILL SIGCHLD SIGTTOU SIGHUP SIGUSR1 SIGALRM pthread_sigmask SIG_BLOCK SIG_SETMASK sigwait"
LACKING = {
    "darwin": {"os": LINUX, "select": "epoll EPOLLIN", "mmap": LINUX_ADVICE, "fcntl": "F_OFD_SETLK", "ctypes": ""},
    "win32": {
        "os": f"{LINUX} {POSIX}",
        "select": "epoll EPOLLIN poll POLLIN",
        "mmap": " ".join(name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))),
        "signal": SIGNALS,
        "socket": "AF_UNIX send_fds recv_fds",
    },
}
ABSENT = {"darwin": (), "win32": ("fcntl", "termios", "resource", "pwd", "grp", "pty")}


class WindowsMap(mmap.mmap):
    """A mapping without flags or advice."""

    def __new__(cls, fileno: int, length: int, tagname: str | None = None, access: int = 0, offset: int = 0) -> Any:
        return super().__new__(cls, fileno, length)

    @property
    def madvise(self) -> Any:  # type: ignore[override]
        raise AttributeError("madvise")


def windows_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if Path(path).is_dir():
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, flags, mode)


def windows_process(*arguments: Any, **options: Any) -> Any:
    if options.get("pass_fds") or options.get("process_group") is not None:
        raise ValueError("pass_fds not supported on Windows.")
    return subprocess.Popen(*arguments, **options)


OTHER: dict[str, dict[str, dict[str, Any]]] = {
    "darwin": {},
    "win32": {"os": {"open": windows_open}, "mmap": {"mmap": WindowsMap}, "subprocess": {"Popen": windows_process}},
}


class Lacking(ModuleType):
    """A module that has what another has, but some names."""

    def __init__(self, module: ModuleType, absent: set[str], other: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        super().__setattr__("_given", (module, absent, other))

    def __getattribute__(self, name: str) -> Any:
        module, absent, other = super().__getattribute__("_given")
        if name in absent:
            raise AttributeError(f"module '{module.__name__}' has no attribute {name!r}")
        return other[name] if name in other else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(super().__getattribute__("_given")[0], name, value)


def pretend(platform: str) -> None:
    """Let modules of streamloader that are imported from now on find this platform."""
    modules: dict[str, ModuleType] = {"sys": Lacking(sys, set(), {"platform": platform})}
    for name in {*LACKING[platform], *OTHER[platform]}:
        absent = set(LACKING[platform].get(name, "").split())
        modules[name] = Lacking(__import__(name), absent, OTHER[platform].get(name, {}))
    before = builtins.__import__

    def replaced(name: str, scope: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if scope is not None and str(scope.get("__name__")).startswith("streamloader"):
            if name in ABSENT[platform]:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in modules:
                return modules[name]
        return before(name, scope, local, fromlist, level)

    builtins.__import__ = replaced
    assert signal.SIGKILL, "other packages have all of it"
