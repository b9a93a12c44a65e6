"""What the tests in this folder share: places, each a shared file system mounted on two hosts.

Most tests here take minutes and packages that few machines have. They run with ``--file-systems`` (``make test-fs``);
without it, only those that need no more than root and a second or two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.filesystems import guests, hosts, shares
from tests.filesystems.guests import NFS
from tests.filesystems.hosts import Host, Hosts
from tests.filesystems.job import Job
from tests.filesystems.shares import Share

NFS_OPTIONS = ("vers=4.2", "vers=3", "vers=3,nolock", "vers=4.2,actimeo=3", "vers=4.2,lookupcache=none")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-systems", action="store_true", help="also run on real shared file systems")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "file_systems: needs real shared file systems; only `make test-fs` runs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--file-systems", default=False):
        return
    left_out = [item for item in items if item.get_closest_marker("file_systems")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@dataclass(frozen=True)
class Place:
    """A shared file system that is mounted on two hosts.

    Attributes:
        name: as in docs/filesystems.md.
        hosts: the two, home's first.
        path: where it is mounted on both.
        logs: a directory for what ranks print.
        job: two ranks, or four where processes are cheap.
        cut_power: ends one of the hosts by its number, with its kernel or its file system client and all that these
            had not sent off.
    """

    name: str
    hosts: list[Host]
    path: Path
    logs: Path
    job: Job
    cut_power: Callable[[int], None]


@dataclass(frozen=True)
class Kind:
    """How to get a `Place`."""

    name: str
    why_not: Callable[[], str | None]
    open: Callable[[], contextlib.AbstractContextManager[Place]]


def _on_hosts(share: Share) -> Kind:
    @contextlib.contextmanager
    def place() -> Iterator[Place]:
        with Hosts("a", "b") as machines, share.mounted(machines) as path:
            both = list(machines)
            with Job(both, machines.directory, ranks_per_host=2) as job:
                yield Place(
                    share.name, list[Host](both), path, machines.directory, job, lambda index: both[index].kill()
                )

    return Kind(share.name, share.why_not, place)


def _on_guests(options: str) -> Kind:
    @contextlib.contextmanager
    def place() -> Iterator[Place]:
        with Hosts() as machines, NFS(options).mounted(machines) as (clients, path):
            name, both = f"NFS {options}", list[Host](clients)
            with Job(clients, machines.directory, ranks_per_host=1) as job:
                yield Place(name, both, path, machines.directory, job, lambda index: clients[index].cut_power())

    return Kind(f"NFS {options}", guests.why_not, place)


KINDS = {
    kind.name: kind
    for kind in (
        *(_on_guests(options) for options in NFS_OPTIONS),
        *(_on_hosts(share) for share in shares.SHARES),
    )
}


@contextlib.contextmanager
def open_place(name: str) -> Iterator[Place]:
    """The place of this name; skips the test where it cannot be had."""
    reason = hosts.why_not() or KINDS[name].why_not()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    with KINDS[name].open() as place:
        yield place
