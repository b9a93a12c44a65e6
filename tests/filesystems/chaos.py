"""`tests.chaosfs` on several hosts: one directory, and for each host a mount of its own with faults of its own.

with Hosts("a", "b") as hosts, ChaosOnHosts(hosts, Habits(), b=Habits(name_cache_s=5.0)) as disk:
    disk.set_rules("a", [Rule("fsync", "*/model", error="EIO")])
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests import chaosfs
from tests.chaosfs import Locks, Rule, Settings
from tests.filesystems.hosts import Hosts, wait_for


@dataclasses.dataclass(frozen=True)
class Habits:
    """What is wrong with a host's mount from the start: the arguments of `tests.chaosfs.ChaosFS`."""

    locks: Locks = "pass"
    exchange: bool = True
    hide_new_names_s: float = 0.0
    name_cache_s: float = 0.0
    missing_name_cache_s: float = 0.0
    attribute_cache_s: float = 0.0


class ChaosOnHosts:
    """Mounts one directory on every host for as long as the ``with`` block runs.

    Args:
        hosts: where.
        habits: of every mount.
        others: of single hosts, by name, instead.

    Attributes:
        path: where it is mounted on each host.
        backing: what is really there.
    """

    def __init__(self, hosts: Hosts, habits: Habits | None = None, **others: Habits) -> None:
        self.path = hosts.directory / "shared"
        self.backing = hosts.directory / "backing"
        self._hosts = hosts
        self._habits = {host.name: others.get(host.name, habits or Habits()) for host in hosts}

    def __enter__(self) -> ChaosOnHosts:
        self.path.mkdir()
        self.backing.mkdir()
        for host in self._hosts:
            self.set_rules(host.name, [])
            self._log(host.name).touch()
            settings = Settings(
                backing=str(self.backing),
                mount=str(self.path),
                rules_file=str(self._rules(host.name)),
                log_file=str(self._log(host.name)),
                stubborn=False,
                **dataclasses.asdict(self._habits[host.name]),
            )
            host.start(
                *(sys.executable, chaosfs.__file__, json.dumps(dataclasses.asdict(settings))),
                log=self._hosts.directory / f"chaosfs-{host.name}.out",
            )
        for host in self._hosts:
            mounts = f"/proc/{host.pid}/mounts"
            wait_for(lambda mounts=mounts: f" {self.path} " in Path(mounts).read_text(), f"chaosfs on {host.name}")  # type: ignore[misc]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The mounts end with their hosts."""

    def set_rules(self, host: str, rules: Sequence[Rule]) -> None:
        """From now on these rules hold on one host; counting begins anew."""
        new = self._rules(host).with_suffix(".new")
        new.write_text(json.dumps([dataclasses.asdict(rule) for rule in rules]))
        os.replace(new, self._rules(host))

    def _rules(self, host: str) -> Path:
        return self._hosts.directory / f"chaosfs-{host}.json"

    def _log(self, host: str) -> Path:
        return self._hosts.directory / f"chaosfs-{host}.jsonl"
