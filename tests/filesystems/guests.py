"""Whole machines with kernels of their own (User Mode Linux), and the kernel's NFS between them.

    with Hosts() as hosts, NFS("vers=4.2").mounted(hosts) as (guests, path):
        guests[0].run("ls", str(path))
        guests[1].cut_power()

An NFS client's caches belong to its kernel, so two mounts in one kernel are not two clients, and a client and its
server in one kernel can deadlock. Guests are processes on the switch of `Hosts`. Their root is this machine's,
read-only; their memory is a file in /dev/shm. They are slow (one processor each, system calls by ptrace) but import
torch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster import die_with_parent
from tests.filesystems.hosts import Host, Hosts, wait_for

KERNEL = "linux.uml"
INIT = Path(__file__).with_name("guest-init.sh")
XSTATE_SOURCE = Path(__file__).with_name("guest-xstate.c")
BOOT_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 120.0
CLIENT_MEMORY = "2500M"
SERVER_MEMORY = "600M"
SERVER_DISK_BYTES = 2 << 30
# For so long a server keeps the locks of a client that has died (NFS 4); the default is 90 s. A server that starts
# gives no new locks for as long, since former clients may claim theirs; this one has no former clients.
LEASE_S = 10
SHARED = Path("/mnt/shared")
EXPORTED = Path("/mnt/exported")
_COMMANDS = (
    (KERNEL, "user-mode-linux"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("rpc.nfsd", "nfs-kernel-server"),
    ("mount.nfs", "nfs-common"),
    ("rpcbind", "rpcbind"),
    ("modprobe", "kmod"),
)


def why_not() -> str | None:
    """Why there can be no guests here; None where there can."""
    for command, package in _COMMANDS:
        if shutil.which(command) is None and not Path("/usr/sbin", command).exists():
            return f"{command} is missing (Debian package {package})"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is missing or not accessible"
    if _needs_xstate() and shutil.which("gcc") is None:
        return "gcc is missing: on processors with AMX, User Mode Linux needs a shim that is compiled"
    return None


def _needs_xstate() -> bool:
    return " amx_tile" in Path("/proc/cpuinfo").read_text()


class Guest(Host):
    """One machine.

    Args:
        hosts: on whose switch it is.
        name: its host name.
        number: the last part of its address.
        memory: in the kernel's own spelling, e.g. ``600M``.
        disk_bytes: the size of a disk of its own, ``/dev/ubda``, if any; it outlives a power cut.
    """

    def __init__(self, hosts: Hosts, name: str, number: int, *, memory: str, disk_bytes: int = 0) -> None:
        self._hosts = hosts
        self._number = number
        self._memory = memory
        self._area = _guests_area(hosts)
        self._disk = self._area / f"{name}.disk" if disk_bytes else None
        self._process: subprocess.Popen[bytes] | None = None
        if self._disk is not None:
            with self._disk.open("wb") as stream:
                stream.truncate(disk_bytes)
        address = f"10.99.0.{number}"
        ssh = (
            *("ssh", "-q", "-i", str(self._area / "user"), "-o", "StrictHostKeyChecking=no"),
            *("-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=10", f"root@{address}"),
        )
        super().__init__(name, address, ["nsenter", f"--target={hosts.server.pid}", "--net", "--", *ssh])
        hosts.know({name: address})
        tap = f"to-{name}"
        hosts.server.shell(f"ip tuntap add {tap} mode tap\nip link set {tap} master switch up")

    def _quoted(self, *arguments: str) -> Sequence[str]:
        return [shlex.join(arguments)]  # ssh hands one string to a shell

    def boot(self) -> None:
        """Starts it and waits until it can be reached. May be called again after :meth:`cut_power`."""
        up = self._area / f"up-{self.name}"
        up.unlink(missing_ok=True)
        disk = [] if self._disk is None else [f"ubda={self._disk}"]
        kernel = (
            *(KERNEL, f"mem={self._memory}", f"umid={self.name}", f"uml_dir={self._area}"),
            *("root=none", "rootfstype=hostfs", "rootflags=/", "ro", f"init={INIT}", "quiet"),
            *(f"EXCHANGE={self._hosts.directory}", f"GUEST_NAME={self.name}", f"GUEST_ADDRESS={self.address}"),
            *(f"eth0=tuntap,to-{self.name},fe:fd:0a:63:00:{self._number:02x}", "con=null", "con0=null,fd:1", *disk),
        )
        environment = {**os.environ, "TMPDIR": "/dev/shm"}
        if _needs_xstate():
            environment["LD_PRELOAD"] = str(_xstate(self._area))
        with (self._area / f"{self.name}.console").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *("nsenter", f"--target={self._hosts.server.pid}", "--net", "--"),
                    # A pid namespace, so that a guest's processes end all at once.
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--", *kernel),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        wait_for(up.exists, f"guest {self.name}", timeout_s=BOOT_TIMEOUT_S)

    def cut_power(self) -> None:
        """Ends it at once: what its kernel had in memory is gone, its disk stays as it is."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                child.send_signal(signal.SIGKILL)
        self._process.wait(BOOT_TIMEOUT_S)
        self._process = None


def _guests_area(hosts: Hosts) -> Path:
    """Keys and settings of the guests' ssh servers, made once."""
    area = hosts.directory / "guests"
    if area.exists():
        return area
    area.mkdir()
    for name in ("user", "host"):
        hosts.server.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(area / name))
    (area / "sshd_config").write_text(
        f"""HostKey {area}/host
AuthorizedKeysFile {area}/user.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxSessions 50
"""
    )
    return area


def _xstate(area: Path) -> Path:
    library = area / "xstate.so"
    if not library.exists():
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(XSTATE_SOURCE)], check=True, timeout=60
        )
    return library


_SERVE = f"""
/run/modprobe nfsd
/run/modprobe lockd
echo 1 > /proc/sys/fs/nfs/nlm_grace_period
mkfs.ext4 -q -F /dev/ubda
mount /dev/ubda {EXPORTED}
mount -t nfsd nfsd /proc/fs/nfsd
echo {LEASE_S} > /proc/fs/nfsd/nfsv4leasetime
echo {LEASE_S} > /proc/fs/nfsd/nfsv4gracetime
rpcbind -w
rpc.statd --no-notify
exportfs -o rw,no_root_squash,no_subtree_check,insecure,fsid=0,sync '*:{EXPORTED}'
rpc.mountd
rpc.nfsd --nfs-version 3 --nfs-version 4 8
echo Y > /proc/fs/nfsd/v4_end_grace
"""


@dataclass(frozen=True)
class NFS:
    """The kernel's NFS: a server on ext4 and two clients, each a guest.

    Attributes:
        options: the clients' mount options, e.g. ``vers=3,nolock``.
        server_disk_bytes: the size of the server's disk.
    """

    options: str
    server_disk_bytes: int = SERVER_DISK_BYTES

    @contextlib.contextmanager
    def mounted(self, hosts: Hosts) -> Iterator[tuple[list[Guest], Path]]:
        """Boots the guests and mounts; gives the clients and the path of the mount on each."""
        server = Guest(hosts, "nfs", 20, memory=SERVER_MEMORY, disk_bytes=self.server_disk_bytes)
        clients = [Guest(hosts, f"guest{number}", 20 + number, memory=CLIENT_MEMORY) for number in (1, 2)]
        try:
            for guest in (server, *clients):
                guest.boot()
            server.shell(_SERVE, timeout_s=COMMAND_TIMEOUT_S)
            for client in clients:
                self.mount(client, server)
            yield clients, SHARED
        finally:
            for guest in (*clients, server):
                guest.cut_power()

    def mount(self, client: Guest, server: Host) -> None:
        """Mounts it on one client, anew after a power cut."""
        exported = str(EXPORTED) if "vers=3" in self.options else "/"
        client.shell(
            f"""/run/modprobe nfsv3
/run/modprobe nfsv4
rpcbind || true
rpc.statd --no-notify || true
mount -t nfs -o {self.options} {server.address}:{exported} {SHARED}""",
            timeout_s=COMMAND_TIMEOUT_S,
        )
