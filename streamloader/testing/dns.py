"""A host name that some processes can resolve, until DNS is gone for them: a name of a store, of a proxy, or of both.

    with FaultProxy("http://127.0.0.1:9000") as proxy, HostName("store.test") as name:
        endpoint = proxy.endpoint.replace("127.0.0.1", name.name)
        with subprocess.Popen(name.command(sys.executable, "train.py", endpoint)) as run:
            name.resolves = False   # connections that are open go on, new ones fail
            ...
            name.resolves = True

The processes get a mount namespace in which the files of `/etc` that name hosts and resolvers are others, so resolution
fails in whatever language a client is written, and no other process sees it. Needs Linux with `unshare` of util-linux,
and root or user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from streamloader.errors import UsageError

ETC = Path("/etc")
# The resolver is an address to which nobody may connect without asking for it, so that an attempt fails at once
RESOLVER = "nameserver 255.255.255.255\noptions attempts:1 timeout:1\n"
# What some systems do not have is not covered; $0 is the folder of the files
_COVER = 'for n in hosts nsswitch.conf resolv.conf; do [ ! -e /etc/$n ] || mount --bind "$0/$n" /etc/$n || exit; done'


class HostName:
    """A name that resolves to an address, for the processes that `command` starts, while `resolves` is true.

    These processes resolve no names besides it but those of `/etc/hosts`. Where `resolves` is false, `getaddrinfo`
    fails at once, with EAI_AGAIN, as where no resolver answers, or, unless `temporary`, with EAI_NONAME, as where the
    name is unknown. To use a real store, give the `name` of its endpoint and its `address`. Entering the context raises
    `UsageError` where the system has no namespaces for this.
    """

    def __init__(self, name: str, address: str = "127.0.0.1", *, temporary: bool = True) -> None:
        self.name = name
        self._address = address
        self._services = "files dns" if temporary else "files"
        self._folder = Path()
        self._place = 0  # of the character in the file of hosts by which the name is a comment or not
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="host-name-")))
            others = [" ".join(word for word in line.split() if word != self.name) for line in _lines("hosts")]
            services = [line for line in _lines("nsswitch.conf") if not line.startswith("hosts:")]
            before = "\n".join([*others, f"{self._address} "])
            self._place = len(before)
            files = {"hosts": f"{before} {self.name}\n", "resolv.conf": RESOLVER}
            files["nsswitch.conf"] = "\n".join([*services, f"hosts: {self._services}\n"])
            for name, text in files.items():
                (self._folder / name).write_text(text, "latin-1")  # which keeps bytes as they are
            self._check()
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @property
    def resolves(self) -> bool:
        """Whether the name resolves now."""
        return (self._folder / "hosts").read_bytes()[self._place : self._place + 1] != b"#"

    @resolves.setter
    def resolves(self, value: bool) -> None:
        """Make the name resolve or not: by one byte, so that each process finds one or the other."""
        with (self._folder / "hosts").open("r+b", buffering=0) as file:
            file.seek(self._place)
            file.write(b" " if value else b"#")

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command that runs a program, and all that it starts, where the name resolves as this says."""
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        shell = ["sh", "-c", f'{_COVER}; exec "$@"', str(self._folder)]
        return ["unshare", "--mount", *as_root, *shell, program, *arguments]

    def _check(self) -> None:
        try:
            done = subprocess.run(
                self.command("getent", "ahosts", self.name), capture_output=True, text=True, check=False
            )
            problem = "" if self._address in done.stdout.split() else done.stderr.strip() or "it does not resolve"
        except OSError as error:
            problem = str(error)
        if problem:
            remedy = "run on Linux, with unshare of util-linux, as root or with user namespaces"
            raise UsageError(f"no process can have the host name {self.name!r}: {problem}", remedy)


def _lines(name: str) -> list[str]:
    return (ETC / name).read_text("latin-1").splitlines() if (ETC / name).exists() else []
