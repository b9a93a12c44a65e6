"""Hosts on one machine: each with a network, mounts, a host name and processes of its own, joined by a switch.

    with Hosts("a", "b") as hosts:
        hosts["a"].run("mount", "-t", "tmpfs", "tmpfs", "/mnt")    # b does not see it
        hosts.cut("b")                                             # a network partition

Unlike the nodes of `tests.cluster`, they reach each other over a network, and each kernel mount point of a shared file
system is a client of its own. `hosts.server` is one more, for the file system's server. Addresses exist inside of the
namespaces only. Everything ends with the block, or with the test process: nothing is left in the machine's own network.

Needs root, and iproute2 and util-linux (`why_not`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from tests.cluster import REPOSITORY, die_with_parent

COMMAND_TIMEOUT_S = 60.0
START_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.05
SERVER = "server"
SERVER_ADDRESS = "10.99.0.1"
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private")
_ENTER = ("--net", "--mount", "--uts", "--ipc", "--pid")
_DIRECTORY_PREFIX = "safe-trainer-hosts-"
# Names come from the hosts' own file: a look-up in the network would wait for a server that is not there.
_NAME_SERVICES = "".join(f"{kind}: files\n" for kind in ("passwd", "group", "hosts", "services", "protocols", "rpc"))


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "hosts with networks of their own need root"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian package {package})"
    trial = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if trial.returncode == 0 else f"no namespaces here: {trial.stderr.decode().strip()}"


class Host:
    """Somewhere to run commands: a host made of namespaces here, or a machine reached by other means.

    Attributes:
        name: its host name.
        address: where other hosts reach it.
    """

    def __init__(self, name: str, address: str, prefix: Sequence[str]) -> None:
        self.name = name
        self.address = address
        self._prefix = tuple(prefix)

    def command(self, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs ``arguments`` there, in the repository."""
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        return [*self._prefix, *self._quoted("env", f"--chdir={REPOSITORY}", *settings, *arguments)]

    def _quoted(self, *arguments: str) -> Sequence[str]:
        return arguments

    def run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, env: Mapping[str, str] | None = None) -> str:
        """Runs a command there and returns what it printed.

        Raises:
            RuntimeError: it failed; the text has its output.
        """
        with tempfile.TemporaryFile("w+") as output:  # not a pipe: daemons keep it open
            done = subprocess.run(
                self.command(*arguments, env=env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=False,
            )
            output.seek(0)
            text = output.read()
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(arguments)} on {self.name} gave {done.returncode}: {text.strip()}")
        return text

    def shell(self, script: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """As :meth:`run`, for a few lines of shell; the first that fails ends it."""
        return self.run("sh", "-ec", script, timeout_s=timeout_s)

    def start(
        self, *arguments: str, log: Path, env: Mapping[str, str] | None = None, talk: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts a command that goes on; its output, or with ``talk`` its errors only, go into ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*arguments, env=env),
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talk else output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )


class LocalHost(Host):
    """A host made of namespaces, held open by a process that does nothing."""

    def __init__(self, name: str, address: str, known: Path, name_services: Path) -> None:
        script = "\n".join(
            [
                f"hostname {name}",
                "mount -t proc proc /proc",
                "mount -t tmpfs tmpfs /dev/shm",
                "ip link set lo up",
                f"mount --bind {known} /etc/hosts",
                f"mount --bind {name_services} /etc/nsswitch.conf",
                "echo ready",
                "exec sleep infinity",
            ]
        )
        self._holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "sh", "-ec", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains of its own death
            preexec_fn=die_with_parent,
        )
        try:
            self.pid = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        super().__init__(name, address, ["nsenter", f"--target={self.pid}", *_ENTER, "--"])

    def _wait_until_ready(self) -> int:
        stdout: IO[bytes] | None = self._holder.stdout
        if stdout is None or stdout.readline() != b"ready\n":
            raise RuntimeError("a host could not be made")
        return psutil.Process(self._holder.pid).children()[0].pid

    def kill(self) -> None:
        """Every process on it ends at once, and its mounts with them, as if it lost its power."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            psutil.Process(self._holder.pid).children()[0].send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._holder.wait(START_TIMEOUT_S)
        self._holder.kill()
        self._holder.wait()


class Hosts:
    """Some hosts and a server with a switch, for as long as the ``with`` block runs.

    Args:
        names: the hosts' names, in the order of their addresses.

    Attributes:
        server: the host with the switch, ``10.99.0.1``.
        directory: for files that all hosts see (keys, settings, logs); not a shared file system under test.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._hosts: dict[str, LocalHost] = {}
        _remove_abandoned()
        prefix = f"{_DIRECTORY_PREFIX}{os.getpid()}-"
        self._directory = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.directory = Path(self._directory.name)
        self.server: LocalHost

    def __enter__(self) -> Hosts:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __getitem__(self, name: str) -> LocalHost:
        return self._hosts[name]

    def __iter__(self) -> Iterator[LocalHost]:
        """The hosts without the server."""
        return iter([self._hosts[name] for name in self._names])

    def know(self, addresses: Mapping[str, str]) -> None:
        """Tells all hosts the names of further machines on the switch."""
        with (self.directory / "hosts").open("a") as known:
            for name, address in addresses.items():
                known.write(f"{address} {name}\n")

    def cut(self, name: str) -> None:
        """Takes a host's cable out of the switch."""
        self.server.run("ip", "link", "set", f"to-{name}", "down")

    def heal(self, name: str) -> None:
        """Puts it back."""
        self.server.run("ip", "link", "set", f"to-{name}", "up")

    def _start(self) -> None:
        addresses = {SERVER: SERVER_ADDRESS} | {
            name: f"10.99.0.{number}" for number, name in enumerate(self._names, start=11)
        }
        known, name_services = self.directory / "hosts", self.directory / "nsswitch.conf"
        known.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self.know(addresses)
        name_services.write_text(_NAME_SERVICES)
        for name, address in addresses.items():
            self._hosts[name] = LocalHost(name, address, known, name_services)
        self.server = self._hosts[SERVER]
        self.server.shell(
            f"ip link add switch type bridge\nip addr add {SERVER_ADDRESS}/24 dev switch\nip link set switch up"
        )
        for host in self:
            # One end of the cable is made on the server, the other straight in the host.
            subprocess.run(
                [
                    *("nsenter", f"--target={self.server.pid}", "--net", "--"),
                    *("ip", "link", "add", f"to-{host.name}", "type", "veth"),
                    *("peer", "name", "eth0", "netns", str(host.pid)),
                ],
                check=True,
                timeout=COMMAND_TIMEOUT_S,
            )
            self.server.run("ip", "link", "set", f"to-{host.name}", "master", "switch", "up")
            host.shell(f"ip addr add {host.address}/24 dev eth0\nip link set eth0 up")

    def _end(self) -> None:
        for host in self._hosts.values():
            host.kill()
        self._directory.cleanup()


def _remove_abandoned() -> None:
    """Deletes what test processes left that were killed before they could clean up."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*-*"):
        pid = directory.name.removeprefix(_DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


def wait_for(condition: Any, what: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns once ``condition()`` holds.

    Raises:
        TimeoutError: it does not for ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_INTERVAL_S)


def environment_of_ranks() -> dict[str, str]:
    """What a Python process on a host needs to be a rank of a job between hosts."""
    return {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
