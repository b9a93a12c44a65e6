"""Shared file systems with their real servers and clients, mounted on two hosts: sshfs, MooseFS, GlusterFS, S3 mounts.

    with Hosts("a", "b") as hosts, MOOSEFS.mounted(hosts) as path:
        ...                                        # `path` on each host is a mount of its own

NFS is in `tests.filesystems.guests`: the kernel's client cannot be had twice in one kernel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.filesystems.hosts import SERVER_ADDRESS, Hosts, LocalHost, wait_for

MOUNT_TIMEOUT_S = 30.0
SSH_PORT = 2222
S3_PORT = 5000
BUCKET = "checkpoints"
# moto takes any; they must be there, since clients refuse to ask without.
_S3_KEY, _S3_SECRET, _S3_REGION = "key", "secret", "us-east-1"


@dataclass(frozen=True)
class Share:
    """One kind of shared file system.

    Attributes:
        name: as in docs/filesystems.md.
        commands: programs that it needs, with the Debian packages that have them.
        modules: Python modules that it needs.
        mounted: mounts it on all hosts, at the path that the context manager gives.
    """

    name: str
    commands: Sequence[tuple[str, str]]
    modules: Sequence[str]
    mounted: Callable[[Hosts], AbstractContextManager[Path]]

    def why_not(self) -> str | None:
        """What is missing here; None where nothing is."""
        for command, package in self.commands:
            if shutil.which(command) is None and not Path("/usr/sbin", command).exists():
                return f"{command} is missing (Debian package {package})"
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"the Python package {module} is missing"
        if not Path("/dev/fuse").exists():
            return "/dev/fuse is missing"
        return None


def _mount_point(hosts: Hosts) -> Path:
    path = hosts.directory / "shared"
    path.mkdir(exist_ok=True)
    return path


def _is_mounted(host: LocalHost, path: Path) -> bool:
    return f" {path} " in host.run("cat", "/proc/mounts")


def _wait_until_mounted(hosts: Hosts, path: Path) -> None:
    for host in hosts:
        wait_for(lambda host=host: _is_mounted(host, path), f"{path} on {host.name}", timeout_s=MOUNT_TIMEOUT_S)  # type: ignore[misc]


def _listens(host: LocalHost, port: int) -> bool:
    listening = host.run("cat", "/proc/net/tcp").splitlines()
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in listening[1:])


@contextlib.contextmanager
def _sshfs(hosts: Hosts) -> Iterator[Path]:
    ssh = hosts.directory / "ssh"
    ssh.mkdir()
    exported = hosts.directory / "exported"
    exported.mkdir()
    for name in ("user", "host"):
        hosts.server.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name))
    (ssh / "config").write_text(
        f"""Port {SSH_PORT}
ListenAddress {SERVER_ADDRESS}
HostKey {ssh}/host
AuthorizedKeysFile {ssh}/user.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""
    )
    hosts.server.shell(f"mkdir -p /run/sshd\n/usr/sbin/sshd -f {ssh}/config")
    wait_for(lambda: _listens(hosts.server, SSH_PORT), "the ssh server")
    path = _mount_point(hosts)
    options = f"IdentityFile={ssh}/user,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR,reconnect"
    for host in hosts:
        host.run("sshfs", "-p", str(SSH_PORT), "-o", options, f"root@{SERVER_ADDRESS}:{exported}", str(path))
    yield path


@contextlib.contextmanager
def _moosefs(hosts: Hosts) -> Iterator[Path]:
    area = hosts.directory / "moosefs"
    for name in ("master", "chunks", "disk"):
        (area / name).mkdir(parents=True)
    (area / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
    (area / "topology").write_text("")
    (area / "disks").write_text(f"{area}/disk/0\n")
    common = "WORKING_USER = root\nWORKING_GROUP = root\nLOCK_MEMORY = 0\n"
    (area / "master.cfg").write_text(
        common
        + f"""DATA_PATH = {area}/master
EXPORTS_FILENAME = {area}/exports
TOPOLOGY_FILENAME = {area}/topology
MATOCL_LISTEN_HOST = {SERVER_ADDRESS}
MATOCS_LISTEN_HOST = {SERVER_ADDRESS}
MATOML_LISTEN_HOST = {SERVER_ADDRESS}
"""
    )
    (area / "chunkserver.cfg").write_text(
        common
        + f"""DATA_PATH = {area}/chunks
HDD_CONF_FILENAME = {area}/disks
MASTER_HOST = {SERVER_ADDRESS}
BIND_HOST = {SERVER_ADDRESS}
HDD_LEAVE_SPACE_DEFAULT = 16MiB
"""
    )
    hosts.server.shell(
        f"""mount -t tmpfs -o size=4g tmpfs {area}/disk
mkdir {area}/disk/0
cp /var/lib/mfs/metadata.mfs.empty {area}/master/metadata.mfs
mfsmaster -c {area}/master.cfg start
mfschunkserver -c {area}/chunkserver.cfg start"""
    )
    path = _mount_point(hosts)
    for host in hosts:
        host.run("mfsmount", str(path), "-H", SERVER_ADDRESS)
    _wait_until_mounted(hosts, path)
    # The master gives no chunks before its chunk server has told it what it has.
    wait_for(lambda: _takes_bytes(hosts, path), "MooseFS's chunk server", timeout_s=60.0)
    yield path


def _takes_bytes(hosts: Hosts, path: Path) -> bool:
    host = next(iter(hosts))
    with contextlib.suppress(RuntimeError):
        host.shell(f"echo bytes > {path}/first && sync -f {path}/first && rm {path}/first", timeout_s=50.0)
        return True
    return False


@contextlib.contextmanager
def _glusterfs(hosts: Hosts) -> Iterator[Path]:
    # GlusterFS has its paths built in. On the server and on each host they are private.
    private = ("/var/lib/glusterd", "/var/log/glusterfs", "/var/run/gluster", "/srv")
    hosts.server.shell(
        "".join(f"mkdir -p {path}\nmount -t tmpfs tmpfs {path}\n" for path in private)
        + """mkdir /srv/brick
cat > /var/lib/glusterd/glusterd.vol <<end
volume management
    type mgmt/glusterd
    option working-directory /var/lib/glusterd
    option transport-type socket
    option transport.socket.listen-port 24007
    option ping-timeout 0
end-volume
end
glusterd -f /var/lib/glusterd/glusterd.vol -p /var/lib/glusterd/pid"""
    )
    gluster = ("gluster", "--mode=script")

    def answers() -> bool:
        with contextlib.suppress(RuntimeError):
            hosts.server.run(*gluster, "volume", "list")
            return True
        return False

    wait_for(answers, "glusterd")
    hosts.server.run(*gluster, "volume", "create", "shared", f"{SERVER_ADDRESS}:/srv/brick", "force")
    hosts.server.run(*gluster, "volume", "start", "shared")
    path = _mount_point(hosts)
    for host in hosts:
        host.shell("mkdir -p /var/log/glusterfs\nmount -t tmpfs tmpfs /var/log/glusterfs")
        host.run("glusterfs", f"--volfile-server={SERVER_ADDRESS}", "--volfile-id=shared", str(path))
    _wait_until_mounted(hosts, path)
    yield path


def _start_s3(hosts: Hosts) -> None:
    """moto, an S3 server for tests, with one bucket."""
    address = f"http://{SERVER_ADDRESS}:{S3_PORT}"
    hosts.server.start(
        *(sys.executable, "-m", "moto.server", "-H", SERVER_ADDRESS, "-p", str(S3_PORT)),
        log=hosts.directory / "moto.log",
    )
    wait_for(lambda: _listens(hosts.server, S3_PORT), "the S3 server", timeout_s=60.0)
    make_bucket = (
        f"import boto3; boto3.client('s3', endpoint_url='{address}', aws_access_key_id='{_S3_KEY}', "
        f"aws_secret_access_key='{_S3_SECRET}', region_name='{_S3_REGION}').create_bucket(Bucket='{BUCKET}')"
    )
    hosts.server.run(sys.executable, "-c", make_bucket)


def _rclone(*cache_options: str) -> Callable[[Hosts], AbstractContextManager[Path]]:
    @contextlib.contextmanager
    def mounted(hosts: Hosts) -> Iterator[Path]:
        _start_s3(hosts)
        config = hosts.directory / "rclone.conf"
        config.write_text(
            f"""[store]
type = s3
provider = Other
endpoint = http://{SERVER_ADDRESS}:{S3_PORT}
access_key_id = {_S3_KEY}
secret_access_key = {_S3_SECRET}
region = {_S3_REGION}
"""
        )
        path = _mount_point(hosts)
        options = ("--cache-dir", "/dev/shm/rclone", "--vfs-cache-mode", "writes", "--allow-other", *cache_options)
        for host in hosts:
            # A variable for other clients' certificates would be taken for this server, which has none.
            host.run(
                *("env", "-u", "AWS_CA_BUNDLE", "rclone", "mount", f"store:{BUCKET}", str(path)),
                *("--config", str(config), "--daemon", *options),
            )
        _wait_until_mounted(hosts, path)
        yield path

    return mounted


@contextlib.contextmanager
def _s3fs(hosts: Hosts) -> Iterator[Path]:
    _start_s3(hosts)
    password = hosts.directory / "s3fs-password"
    password.touch(mode=0o600)
    password.write_text(f"{_S3_KEY}:{_S3_SECRET}\n")
    path = _mount_point(hosts)
    options = (
        f"passwd_file={password},url=http://{SERVER_ADDRESS}:{S3_PORT},use_path_request_style,"
        f"endpoint={_S3_REGION},tmpdir=/dev/shm"
    )
    for host in hosts:
        host.run("s3fs", BUCKET, str(path), "-o", options)
    _wait_until_mounted(hosts, path)
    yield path


_S3_MODULES = ("moto", "boto3", "flask", "flask_cors")

SSHFS = Share("sshfs", [("sshfs", "sshfs"), ("sshd", "openssh-server")], [], _sshfs)
MOOSEFS = Share(
    "MooseFS",
    [("mfsmaster", "moosefs-master"), ("mfschunkserver", "moosefs-chunkserver"), ("mfsmount", "moosefs-client")],
    [],
    _moosefs,
)
GLUSTERFS = Share("GlusterFS", [("glusterd", "glusterfs-server"), ("glusterfs", "glusterfs-client")], [], _glusterfs)
_RCLONE_COMMANDS = [("rclone", "rclone")]
RCLONE = Share("rclone", _RCLONE_COMMANDS, _S3_MODULES, _rclone())
# Its defaults keep listings for five minutes, and written files to itself for five seconds.
RCLONE_SHORT_CACHES = Share(
    "rclone with short caches",
    _RCLONE_COMMANDS,
    _S3_MODULES,
    _rclone("--dir-cache-time", "1s", "--attr-timeout", "1s", "--vfs-write-back", "0s"),
)
S3FS = Share("s3fs", [("s3fs", "s3fs")], _S3_MODULES, _s3fs)
SHARES = (GLUSTERFS, MOOSEFS, SSHFS, RCLONE, RCLONE_SHORT_CACHES, S3FS)
