"""Power cuts without a machine to switch off: which states of the disks a run's tape allows.

A model of what file systems promise, and of nothing more:

- a file's content is on the disk after its fsync; until then it has no bytes;
- a name that was made, renamed or removed is so on the disk after an fsync of its directory;
- a rename is one step: once the directory that it leads to is fsynced, the old name is gone, too;
- what was not fsynced may be on the disk all the same.

The last makes many states out of each moment. :data:`MODES` are the three ends of what is possible. Real file systems
are somewhere between them (and keep promises that this model does not know, such as ext4's order of renames and data).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.faults.crash_tape import CLAIM, KILLED, Operation

MODES = {
    "names lost": "no name is made, renamed or removed before its directory's fsync",
    "renames first": "renames and removals are on the disk at once, new names and data after an fsync",
    "data lost": "all names are on the disk at once, data after an fsync (what ext4 without its heuristics does)",
}


@dataclass(eq=False)
class File:
    """A file: ``content`` is where its bytes are kept, ``dirty`` whether they may be lost."""

    dirty: bool
    content: str = ""


@dataclass(eq=False)
class Directory:
    """A directory: its names as programs see them, and as each mode but the last would find them after a power cut."""

    now: dict[str, Node] = field(default_factory=dict)
    lost: dict[str, Node] = field(default_factory=dict)
    eager: dict[str, Node] = field(default_factory=dict)

    def names(self, mode: str) -> dict[str, Node]:
        return {"names lost": self.lost, "renames first": self.eager, "data lost": self.now}[mode]

    def set_durable(self, name: str, node: Node) -> None:
        self.now[name] = self.lost[name] = self.eager[name] = node


Node = File | Directory


@dataclass(frozen=True)
class DiskState:
    """What the disks hold after a power cut: files by path (None for one without bytes), and directories."""

    files: frozenset[tuple[str, File | None]]
    directories: frozenset[str]

    def build(self, root: Path) -> None:
        """Make it below ``root``, which must not exist."""
        for directory in sorted(self.directories):
            (root / directory).mkdir(parents=True)
        for path, file in self.files:
            if file is None:
                (root / path).touch()
            else:
                os.link(file.content, root / path)


@dataclass(frozen=True)
class Cut:
    """A power cut: after which operation of the tape (-1 for none), in which mode, and the state that is left."""

    after: int
    mode: str
    state: DiskState


class Disks:
    """The model's disks; starts with what is below ``start``, all of it durable."""

    def __init__(self, start: Path) -> None:
        self._top = _read(start)

    def apply(self, operation: Operation) -> None:
        """Do to the model what ``operation`` did to the disks."""
        if not operation.ok or operation.op in (KILLED, CLAIM):
            return
        if operation.op in ("create", "open", "truncate", "write"):
            self._touch(operation)
        elif operation.op == "fsync":
            self._fsync(operation.path)
        elif operation.op == "mkdir":
            parent, name = self._place(operation.path)
            parent.now[name] = Directory()
        elif operation.op in ("rename", "replace"):
            self._rename(operation)
        elif operation.op == "exchange":
            self._exchange(operation)
        elif operation.op == "link":
            source, name = self._place(operation.path)
            target, new_name = self._place(operation.to)
            target.now[new_name] = source.now[name]
        elif operation.op in ("unlink", "rmdir"):
            parent, name = self._place(operation.path)
            _keep_content(parent.now.pop(name), operation)
            parent.eager.pop(name, None)

    def state(self, mode: str) -> DiskState:
        """What a power cut in ``mode`` leaves now."""
        files: set[tuple[str, File | None]] = set()
        directories: set[str] = set()
        for path, node in _walk(self._top, mode, ""):
            if isinstance(node, Directory):
                directories.add(path)
            else:
                files.add((path, None if node.dirty else node))
        return DiskState(frozenset(files), frozenset(directories))

    def finish(self, root: Path) -> None:
        """Note where the contents are that are still there, below ``root``, at the end of the run.

        Raises:
            AssertionError: the disks are not as the tape says, so there was an operation that the tape has not seen.
        """
        model = dict(_walk(self._top, "data lost", ""))
        real = {path.relative_to(root).as_posix() for path in root.rglob("*")}
        assert set(model) == real, f"not on the tape: {sorted(set(model) ^ real)}"
        for path, node in model.items():
            if isinstance(node, File):
                node.content = str(root / path)

    def _place(self, path: str) -> tuple[Directory, str]:
        pure = PurePosixPath(path)
        node: Node = self._top
        for part in pure.parts[:-1]:
            assert isinstance(node, Directory)
            node = node.now[part]
        assert isinstance(node, Directory)
        return node, pure.name

    def _touch(self, operation: Operation) -> None:
        parent, name = self._place(operation.path)
        node = parent.now.get(name)
        if node is None:
            parent.now[name] = File(dirty=True)
        elif operation.op in ("truncate", "write"):
            assert isinstance(node, File)
            node.dirty = True

    def _fsync(self, path: str) -> None:
        parent, name = self._place(path)
        node = parent.now[name]
        if isinstance(node, File):
            node.dirty = False
            return
        for child_name, child in node.now.items():
            if node.lost.get(child_name) is not child:
                self._forget_former_name(node, child)
        node.lost, node.eager = dict(node.now), dict(node.now)

    def _forget_former_name(self, new_parent: Directory, child: Node) -> None:
        """A rename into ``new_parent`` has become durable: it is one step, so the old name is gone as well."""
        for directory in (node for _, node in _walk_all(self._top) if isinstance(node, Directory)):
            if directory is new_parent:
                continue
            for name in [name for name, node in directory.lost.items() if node is child]:
                if directory.now.get(name) is not child:  # a second link to a file stays
                    directory.lost.pop(name)
                    # After an exchange, the other one is in its place.
                    if name in directory.now:
                        directory.lost[name] = directory.now[name]

    def _rename(self, operation: Operation) -> None:
        source, name = self._place(operation.path)
        target, new_name = self._place(operation.to)
        replaced = target.now.get(new_name)
        if replaced is not None:
            _keep_content(replaced, operation)
        node = source.now.pop(name)
        source.eager.pop(name, None)
        target.now[new_name] = target.eager[new_name] = node

    def _exchange(self, operation: Operation) -> None:
        first, first_name = self._place(operation.path)
        second, second_name = self._place(operation.to)
        one, other = first.now[first_name], second.now[second_name]
        first.now[first_name] = first.eager[first_name] = other
        second.now[second_name] = second.eager[second_name] = one


def cuts_of(tape: Sequence[Operation], *, start: Path, end: Path) -> list[Cut]:
    """Every power cut of a run: before its first operation and after each, in each mode.

    Args:
        tape: of a run that came to its end, with contents kept.
        start: a copy of the disks as they were before it.
        end: the disks after it.
    """
    disks = Disks(start)
    cuts = [Cut(-1, mode, disks.state(mode)) for mode in MODES]
    for index, operation in enumerate(tape):
        disks.apply(operation)
        cuts += [Cut(index, mode, disks.state(mode)) for mode in MODES]
    disks.finish(end)
    return cuts


def _read(directory: Path) -> Directory:
    node = Directory()
    for path in directory.iterdir():
        child: Node = _read(path) if path.is_dir() else File(dirty=False, content=str(path))
        node.set_durable(path.name, child)
    return node


def _walk(directory: Directory, mode: str, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, node in directory.names(mode).items():
        yield f"{prefix}{name}", node
        if isinstance(node, Directory):
            yield from _walk(node, mode, f"{prefix}{name}/")


def _walk_all(directory: Directory) -> Iterator[tuple[str, Node]]:
    """Every directory that is anywhere to be found, also under names that only a power cut would bring back."""
    seen: set[int] = set()
    waiting: list[tuple[str, Node]] = [("", directory)]
    while waiting:
        name, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield name, node
        if isinstance(node, Directory):
            waiting += [*node.now.items(), *node.lost.items(), *node.eager.items()]


def _keep_content(node: Node, operation: Operation) -> None:
    if isinstance(node, File) and operation.content:
        node.content = operation.content
