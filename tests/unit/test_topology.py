"""topology: which ranks see the same run directory (cases S2, S6, L10, F4). Found out by looking, in real processes.

Separate disks are played by letting a rank not see (`os.stat`, `os.listdir`) what is in another's directory.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from safe_trainer import topology
from safe_trainer.channel import Channel
from safe_trainer.disk import Mount, mount_of
from safe_trainer.errors import CheckpointError, StorageError
from safe_trainer.layout import RunLayout
from safe_trainer.options import Storage
from safe_trainer.topology import Domain, Topology, find_topology, format_ranks, wait_until_visible
from tests.unit.mounts import leave_mount_namespace, make_read_only, needs_mounts
from tests.unit.processes import Raised, outcome_of, run_ranks

# --- who is who, once it is known ---

# Node 0 has ranks 0 and 1, node 1 has 2 and 3, node 2 has 4; nodes 0 and 2 share a disk.
PAIR = Topology(rank=2, domains=(Domain((0, 1, 4)), Domain((2, 3))), nodes=(0, 0, 1, 1, 2))


def seen_by(rank: int) -> Topology:
    return Topology(rank=rank, domains=PAIR.domains, nodes=PAIR.nodes)


def test_home_is_where_rank_0_is() -> None:
    assert PAIR.home == Domain((0, 1, 4))
    assert [seen_by(rank).is_home for rank in range(5)] == [True, True, False, False, True]


def test_the_lowest_rank_of_a_domain_leads_it() -> None:
    assert [domain.leader for domain in PAIR.domains] == [0, 2]
    assert [seen_by(rank).is_leader for rank in range(5)] == [True, False, True, False, False]


def test_every_rank_has_a_domain() -> None:
    assert [seen_by(rank).domain.leader for rank in range(5)] == [0, 0, 2, 2, 0]
    assert PAIR.domain_of(4) == PAIR.home
    assert PAIR.world_size == 5


def test_peers_share_both_node_and_disk() -> None:
    assert [PAIR.node_peers(rank) for rank in range(5)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4,)]


def test_one_rank_of_each_node_in_a_domain_lists_files() -> None:
    assert [seen_by(rank).is_lister() for rank in range(5)] == [True, False, True, False, True]


def test_it_is_told_in_one_line() -> None:
    assert PAIR.describe() == "3 node(s), 5 rank(s), 2 storage domain(s): ranks 0-1,4 (home) | ranks 2-3"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "rank 0"), ((0, 1), "ranks 0-1"), ((0, 2), "ranks 0,2"), ((0, 1, 2, 5, 7, 8), "ranks 0-2,5,7-8")],
)
def test_ranks_are_told_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


# --- looking, with one process ---


def test_one_process_is_home_alone_and_leaves_nothing(tmp_path: Path) -> None:
    found = find_topology(
        Channel.open(timeout_s=1.0), tmp_path / "new" / "out", storage="auto", visibility_timeout_s=1.0
    )
    assert found == Topology(rank=0, domains=(Domain((0,)),), nodes=(0,))
    assert list(RunLayout(tmp_path / "new" / "out").tokens.iterdir()) == []


# --- looking, with three ---


class Scene(NamedTuple):
    """What three ranks face.

    Attributes:
        directories: each rank's run directory.
        unseen: for each rank, the ranks whose tokens it cannot see.
        nodes: each rank's node.
        storage: what the user insists on.
        network: whether the file system counts as a network one.
        sources: what each rank has mounted.
        unseen_for_s: after this many seconds everything is seen.
        visibility_timeout_s: the option.
    """

    directories: tuple[Path, Path, Path]
    unseen: dict[int, set[int]]
    nodes: tuple[str, str, str] = ("0", "1", "2")
    storage: Storage = "auto"
    network: bool = False
    sources: tuple[str, str, str] = ("none", "none", "none")
    unseen_for_s: float = 1e9
    visibility_timeout_s: float = 0.4


def look(scene: Scene) -> list[Topology | Raised]:
    """What each rank finds."""

    def body(channel: Channel) -> Topology | Raised:
        os.environ["GROUP_RANK"] = scene.nodes[channel.rank]
        kind = "nfs4" if scene.network else "ext4"
        topology.mount_of = lambda path: Mount(kind, frozenset(), scene.sources[channel.rank])  # type: ignore[attr-defined]
        _hide_tokens_of(scene.unseen.get(channel.rank, set()), scene.unseen_for_s)
        return outcome_of(
            lambda: find_topology(
                channel,
                scene.directories[channel.rank],
                storage=scene.storage,
                visibility_timeout_s=scene.visibility_timeout_s,
            )
        )

    return run_ranks(body)


def _hide_tokens_of(ranks: set[int], seconds: float) -> None:
    """Let this process not see the tokens of ``ranks`` for a while: what a separate disk or a stale cache does."""
    real = os.stat
    hidden = tuple(f"-{rank}" for rank in ranks)
    first: list[float] = []

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if hidden and f"/{RunLayout(Path()).tokens}/" in os.fspath(path) and os.fspath(path).endswith(hidden):
            first.append(time.monotonic())
            if time.monotonic() - first[0] < seconds:
                raise FileNotFoundError(2, "hidden by the test", path)
        return real(path, *args, **kwargs)

    os.stat = stat


def error_of(scene: Scene) -> Raised:
    """The error, which must be the same on every rank."""
    outcomes = look(scene)
    raised = {outcome for outcome in outcomes if isinstance(outcome, Raised)}
    assert len(raised) == 1, outcomes
    assert all(isinstance(outcome, Raised) for outcome in outcomes), outcomes
    return raised.pop()


def domains_of(outcomes: list[Topology | Raised]) -> tuple[tuple[int, ...], ...]:
    """The domains, about which all ranks must agree."""
    assert all(isinstance(outcome, Topology) for outcome in outcomes), outcomes
    found = [outcome for outcome in outcomes if isinstance(outcome, Topology)]
    assert [outcome.rank for outcome in found] == [0, 1, 2]
    (domains,) = {tuple(domain.ranks for domain in outcome.domains) for outcome in found}
    return domains


EVERYBODY_ELSE = {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The same path everywhere."""
    return (tmp_path / "out",) * 3


def test_who_sees_one_directory_shares_it(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, {}))) == ((0, 1, 2),)
    assert list(RunLayout(one[0]).tokens.iterdir()) == []


def test_who_sees_only_its_own_is_alone(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, EVERYBODY_ELSE))) == ((0,), (1,), (2,))


def test_nodes_may_share_in_groups(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, {0: {1}, 1: {0, 2}, 2: {1}}))) == ((0, 2), (1,))


def test_ranks_of_one_node_know_it(one: tuple[Path, Path, Path]) -> None:
    found = look(Scene(one, {}, nodes=("0", "1", "0")))
    assert [outcome.nodes for outcome in found if isinstance(outcome, Topology)] == [(0, 1, 0)] * 3


def test_paths_may_differ_where_disks_do(tmp_path: Path) -> None:
    directories = (tmp_path / "0", tmp_path / "1", tmp_path / "2")
    assert domains_of(look(Scene(directories, EVERYBODY_ELSE))) == ((0,), (1,), (2,))


def test_paths_may_differ_where_they_lead_to_one_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    assert domains_of(look(Scene((tmp_path / "out", tmp_path / "link", tmp_path / "out"), {}))) == ((0, 1, 2),)


def test_different_directories_on_one_disk_are_an_error_that_names_both(tmp_path: Path) -> None:
    raised = error_of(Scene((tmp_path / "out-1", tmp_path / "out-2", tmp_path / "out-1"), {}))
    assert raised.kind == "StorageError"
    assert str(tmp_path / "out-1") in raised.message
    assert str(tmp_path / "out-2") in raised.message
    assert "rank 0" in raised.message
    assert "rank 1" in raised.message
    assert "output_dir" in raised.message


@pytest.mark.parametrize(
    "unseen",
    [{1: {0}}, {0: {1}}, {0: {1}, 1: {0}}, {2: {0, 1}}],
    ids=["one way", "other way", "not transitive", "blind"],
)
def test_views_that_do_not_fit_are_an_error_that_names_the_ranks(
    one: tuple[Path, Path, Path], unseen: dict[int, set[int]]
) -> None:
    raised = error_of(Scene(one, unseen))
    assert raised.kind == "StorageError"
    assert raised.message.count("rank ") >= 3
    assert socket.gethostname() in raised.message


def test_a_rank_that_does_not_even_see_its_own_file_is_an_error(one: tuple[Path, Path, Path]) -> None:
    raised = error_of(Scene(one, {0: {0, 1, 2}, 1: {0, 2}, 2: {0, 1}}))
    assert raised.kind == "StorageError"


# --- what the user insists on (S2) ---


def test_insisting_on_shared_is_fine_where_it_is(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, {}, storage="shared"))) == ((0, 1, 2),)


def test_insisting_on_shared_with_separate_disks_is_an_error_with_the_ways_out(one: tuple[Path, Path, Path]) -> None:
    raised = error_of(Scene(one, EVERYBODY_ELSE, storage="shared"))
    assert raised.kind == "StorageError"
    assert "storage='shared'" in raised.message
    assert "rank 0" in raised.message
    assert "rank 1" in raised.message


def test_insisting_on_local_is_fine_where_it_is(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, EVERYBODY_ELSE, storage="local"))) == ((0,), (1,), (2,))


def test_insisting_on_local_where_nodes_see_one_directory_is_an_error(one: tuple[Path, Path, Path]) -> None:
    raised = error_of(Scene(one, {}, storage="local"))
    assert raised.kind == "StorageError"
    assert "storage='local'" in raised.message


def test_ranks_of_one_node_share_their_local_disk(one: tuple[Path, Path, Path]) -> None:
    assert domains_of(look(Scene(one, {}, nodes=("0", "0", "0"), storage="local"))) == ((0, 1, 2),)


# --- file systems that lag (S6) ---


def test_on_a_network_file_system_absence_is_believed_only_after_a_while(one: tuple[Path, Path, Path]) -> None:
    scene = Scene(one, {1: {0}}, network=True, unseen_for_s=0.5, visibility_timeout_s=5.0)
    assert domains_of(look(scene)) == ((0, 1, 2),)


def test_where_some_see_what_others_do_not_absence_is_looked_at_again(one: tuple[Path, Path, Path]) -> None:
    """Nothing speaks of a network file system, but one rank's view lags behind the others'."""
    scene = Scene(one, {1: {0}}, network=False, unseen_for_s=0.5, visibility_timeout_s=5.0)
    assert domains_of(look(scene)) == ((0, 1, 2),)


def test_insisting_on_shared_looks_for_as_long_as_the_option_says(one: tuple[Path, Path, Path]) -> None:
    scene = Scene(one, {1: {0}}, storage="shared", unseen_for_s=0.5, visibility_timeout_s=5.0)
    assert domains_of(look(scene)) == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("network", "nodes"), [(False, ("0", "1", "2")), (True, ("0", "0", "0"))], ids=["local disk", "one node"]
)
def test_elsewhere_absence_is_believed_at_once(
    one: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, network: bool, nodes: tuple[str, str, str]
) -> None:
    monkeypatch.setattr(topology, "ABSENCE_PATIENCE_S", 40.0)
    begin = time.monotonic()
    scene = Scene(one, EVERYBODY_ELSE, network=network, nodes=nodes, visibility_timeout_s=40.0)
    assert domains_of(look(scene)) == ((0,), (1,), (2,))
    assert time.monotonic() - begin < 40.0


class Partition(NamedTuple):
    mountpoint: str
    fstype: str
    opts: str = "rw"
    device: str = "none"


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("nfs4", True),
        ("NFS", True),
        ("fuse.sshfs", True),
        ("fuse.glusterfs", True),
        ("lustre", True),
        ("cifs", True),
        ("ext4", False),
        ("xfs", False),
        ("tmpfs", False),
        ("overlay", False),
    ],
)
def test_the_file_system_of_the_nearest_mount_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, network: bool
) -> None:
    other = "ext4" if network else "nfs"
    mounts = [Partition("/", other), Partition(str(tmp_path), kind), Partition(str(tmp_path / "out" / "deeper"), other)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert mount_of(tmp_path / "out").is_network is network


SERVER = "server:/export"


@pytest.mark.parametrize("storage", ["auto", "local"])
def test_one_directory_of_a_server_is_not_taken_for_two_disks(tmp_path: Path, storage: Storage) -> None:
    """Caches that lag for longer than anybody looks; two leaders there would delete each other's files."""
    scene = Scene(
        directories=(tmp_path, tmp_path, tmp_path),
        unseen={0: {2}, 1: {2}, 2: {0, 1}},
        network=True,
        sources=(SERVER, SERVER, SERVER),
        storage=storage,
        nodes=("0", "0", "1"),
    )
    found = look(scene)
    if storage == "local":
        assert all(isinstance(topology, Topology) and len(topology.domains) == 2 for topology in found)
        return
    for outcome in found:
        assert isinstance(outcome, Raised)
        assert outcome.kind == "StorageError"
        assert "rank 0" in outcome.message
        assert "rank 2" in outcome.message
        assert SERVER in outcome.message


@pytest.mark.parametrize(
    ("network", "sources"),
    [(True, (SERVER, SERVER, "other:/export")), (True, ("s3fs", "s3fs", "s3fs")), (False, (SERVER, SERVER, SERVER))],
    ids=["two servers", "a source that names no server", "no network file system"],
)
def test_what_may_be_two_disks_is_taken_for_two(tmp_path: Path, network: bool, sources: tuple[str, str, str]) -> None:
    scene = Scene(
        directories=(tmp_path, tmp_path, tmp_path),
        unseen={0: {2}, 1: {2}, 2: {0, 1}},
        network=network,
        sources=sources,
        nodes=("0", "0", "1"),
    )
    for found in look(scene):
        assert isinstance(found, Topology)
        assert len(found.domains) == 2


def test_a_stale_handle_of_the_token_directory_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on GlusterFS: another node had just removed it."""
    real = Path.touch
    stale = [OSError(errno.ESTALE, "Stale file handle")]

    def touch(self: Path, *args: Any, **kwargs: Any) -> None:
        if stale:
            raise stale.pop()
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", touch)
    find_topology(Channel.open(timeout_s=1.0), tmp_path / "out", storage="auto", visibility_timeout_s=1.0)
    assert not stale


# --- what cannot be written (F4) ---


@needs_mounts()
def test_a_read_only_directory_is_found_at_the_start_and_named(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()

    def body(channel: Channel) -> Topology | Raised:
        if channel.rank == 1:
            leave_mount_namespace()
            make_read_only(directory)
        return outcome_of(lambda: find_topology(channel, directory, storage="auto", visibility_timeout_s=1.0))

    (message,) = {outcome.message for outcome in run_ranks(body) if isinstance(outcome, Raised)}
    assert "rank 1" in message
    assert "EROFS" in message
    assert str(directory) in message


def test_a_file_in_place_of_the_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(Exception, match=str(tmp_path / "out")):
        find_topology(Channel.open(timeout_s=1.0), tmp_path / "out", storage="auto", visibility_timeout_s=1.0)


# --- waiting for what another rank says exists ---

ALONE = Channel(None, rank=0, world_size=1)


def test_what_can_be_seen_is_not_waited_for(tmp_path: Path) -> None:
    begin = time.monotonic()
    wait_until_visible(tmp_path, check=ALONE.raise_if_others_failed, timeout_s=30.0)
    assert time.monotonic() - begin < 1.0


def test_what_appears_later_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "POLL_INTERVAL_S", 0.01)
    _appear_after(3, tmp_path / "file", monkeypatch)
    wait_until_visible(tmp_path / "file", check=ALONE.raise_if_others_failed, timeout_s=10.0)


def _appear_after(looks: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., list[str]] = os.listdir
    listed: list[str] = []

    def listdir(directory: Any) -> list[str]:
        listed.append(os.fspath(directory))
        if len(listed) == looks:
            path.touch()
        return real(directory)

    monkeypatch.setattr(os, "listdir", listdir)


def test_its_parent_is_listed_which_makes_nfs_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    monkeypatch.setattr(os, "listdir", lambda directory: listed.append(os.fspath(directory)))
    with pytest.raises(StorageError):
        wait_until_visible(tmp_path / "file", check=ALONE.raise_if_others_failed, timeout_s=0.0)
    assert listed == [str(tmp_path)]


def test_what_never_appears_is_an_error_that_says_which_option_to_raise(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        wait_until_visible(tmp_path / "not" / "there", check=ALONE.raise_if_others_failed, timeout_s=0.1)
    assert str(tmp_path / "not" / "there") in str(caught.value)
    assert "visibility_timeout_s" in str(caught.value)


def test_a_stale_handle_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    failures = [OSError(116, "Stale file handle")]

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if failures and os.fspath(path) == str(tmp_path):
            raise failures.pop()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(topology, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(os, "stat", stat)
    wait_until_visible(tmp_path, check=ALONE.raise_if_others_failed, timeout_s=5.0)
    assert failures == []


def test_nobody_looks_on_for_what_a_rank_that_failed_did_not_make(tmp_path: Path) -> None:
    def wait_for_rank_1(channel: Channel) -> tuple[str, float]:
        def make_or_wait() -> None:
            if channel.rank == 1:
                raise FileNotFoundError(errno.ENOENT, "swept away", str(tmp_path / "file"))
            wait_until_visible(tmp_path / "file", check=channel.raise_if_others_failed, timeout_s=60.0)

        begin = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            channel.together("wait", make_or_wait)
        return str(caught.value), time.monotonic() - begin

    texts, seconds = zip(*run_ranks(wait_for_rank_1), strict=True)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 ")
    assert "swept away" in texts[0]
    assert max(seconds) < 10.0
