"""Where a rank's files go while training stands still, and how they come into the staging directory afterwards.

- :class:`Staging`: into the staging directory itself. Nothing is left to do.
- :class:`InDirectory`: into a directory of the node (an NVMe disk, say), from which they are moved.
- :class:`InMemory`: into memory. The calls that serialize run as usual and take the whole object apart; only the last
  thing they do, to write bytes into a file, is put off: the tensors' bytes are copied into buffers that are kept from
  save to save, and the same calls write them into the same file later. So the file is the same, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from safe_trainer.errors import OptionError
from safe_trainer.layout import list_files
from safe_trainer.options import IN_MEMORY, ON_DISK
from safe_trainer.process import available_memory

logger = logging.getLogger(__name__)

# The hooks are put on parts of these modules that they do not promise to keep; memory_problem() looks whether they fit.
_torch_files: Any = torch.serialization
_safetensors: Any = safetensors.torch

# What training and the system may need besides.
USABLE_MEMORY = 0.9


@dataclass(frozen=True)
class MemoryRoom:
    """What a rank needs of its node's memory for a save, and what it sees there, in bytes."""

    needed: int
    available: int


class Staging:
    """One rank's way of putting a checkpoint aside, for one save at a time. This one writes files where they belong."""

    def room_for(self, expected_bytes: int) -> MemoryRoom | None:
        """What a save of so many bytes of this rank takes of the node's memory; None where it takes none."""
        return None

    def admitted(self, rooms: Sequence[MemoryRoom]) -> Staging:
        """What to use for the next save, when all ranks of the node have said what they need."""
        return self

    @contextlib.contextmanager
    def writing(self, staged: Path) -> Iterator[Path]:
        """Inside, this rank writes its files, into the directory that this gives."""
        yield staged

    def bring(self, staged: Path) -> None:
        """Bring what this rank has written into ``staged``; called when all ranks have written."""

    def clear(self) -> None:
        """Let go of what is left of this save, whether it succeeded or not."""


class InDirectory(Staging):
    """Files are written into a directory of the node, and moved by its ranks together.

    Args:
        directory: on every node of its own.
        run_directory: whose checkpoints they are; other runs may use the same directory.
        index, count: which one of its node's ranks this is, and how many there are.

    Raises:
        OptionError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, *, run_directory: Path, index: int, count: int) -> None:
        name = hashlib.sha256(os.fsencode(os.path.abspath(run_directory))).hexdigest()[:16]
        # The host's name, for directories that are not each node's own after all.
        self._directory = directory / f"safe_trainer-{name}-{socket.gethostname()}"
        self._index = index
        self._count = count
        self._local: Path | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._directory).close()
        except OSError as error:
            raise OptionError(f"staging={str(directory)!r}: nothing can be written there ({error}).") from error

    @contextlib.contextmanager
    def writing(self, staged: Path) -> Iterator[Path]:
        self._local = self._directory / staged.parent.name / staged.name
        self._local.mkdir(parents=True, exist_ok=True)
        if self._index == 0:
            for left in set(self._directory.iterdir()) - {self._local.parent}:
                shutil.rmtree(left, ignore_errors=True)  # of a dead run: one run saves one checkpoint at a time
        yield self._local

    def bring(self, staged: Path) -> None:
        if self._local is None:
            return
        source = self._local.parent  # with what a subclass has written beside the checkpoint
        for path in list(list_files(source))[self._index :: self._count]:
            target = staged.parent / path
            target.parent.mkdir(parents=True, exist_ok=True)
            # Not os.rename: where both are on one disk, the other ranks' listing must not change.
            shutil.copy(source / path, target)

    def clear(self) -> None:
        if self._index == 0 and self._local is not None:
            shutil.rmtree(self._local.parent, ignore_errors=True)
        self._local = None


# --- memory ---


class _Buffers:
    """CPU memory that is kept, and thus warm, from save to save; pinned where there is a GPU."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._taken: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """How much memory is held."""
        free = sum(size * len(storages) for size, storages in self._free.items())
        return free + sum(storage.nbytes() for storage in self._taken.values())

    def copy(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of ``source`` in a buffer of the same size; ``source`` itself where it is one of the buffers."""
        if id(source) in self._taken:
            return source
        target = self._take(source.nbytes())
        if target.nbytes():
            target.copy_(source, non_blocking=source.device.type != "cpu")
        return target

    def copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor."""
        target = self._take(tensor.numel() * tensor.element_size())
        copied = torch.empty(0, dtype=tensor.dtype).set_(target).view(tensor.shape)
        copied.copy_(tensor.detach(), non_blocking=tensor.device.type != "cpu")
        return copied

    def give_back(self) -> None:
        """Everything may be overwritten by the next save. What the last save had no use for is released."""
        if not self._taken:
            return
        self._free.clear()
        for storage in self._taken.values():
            self._free[storage.nbytes()].append(storage)
        self._taken.clear()

    def _take(self, size: int) -> torch.UntypedStorage:
        target = self._free[size].pop() if self._free[size] else self._new(size)
        self._taken[id(target)] = target
        return target

    @staticmethod
    def _new(size: int) -> torch.UntypedStorage:
        if size and torch.cuda.is_available():
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
            except RuntimeError as error:  # the system lets nobody pin so much
                logger.info("memory staging without pinned memory: %s", error)
        return torch.empty(size, dtype=torch.uint8).untyped_storage()


@dataclass
class _Archive:
    """Stands for the writer that torch.save fills, and keeps what it is given."""

    buffers: _Buffers
    records: list[tuple[str, Any, int]] = field(default_factory=list)

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            data = self.buffers.copy(data)
        elif not isinstance(data, (bytes, str)):
            raise TypeError(f"torch.save hands over {type(data).__name__}, which memory staging does not know")
        self.records.append((name, data, size))

    def write(self, path: str) -> None:
        with _torch_files._open_zipfile_writer(path) as archive:
            for record in self.records:
                archive.write_record(*record)


@dataclass
class _Postponed:
    """A file that is to be written later.

    Attributes:
        path: where it was when it was recorded; whoever saved it may have renamed it since.
        inode: of the empty file that stands for it meanwhile: device and number.
        write: writes it.
    """

    path: str
    inode: tuple[int, int]
    write: Callable[[str], None]

    def bring(self) -> None:
        self.write(self.path)


class InMemory(Staging):
    """Files are put together in memory and written afterwards.

    What goes through ``torch.save`` to a path and through safetensors' ``save_file`` is put off; everything else is
    written at once, as without staging. Meanwhile an empty file stands for each of them, so that it can be renamed or
    removed.
    """

    def __init__(self) -> None:
        self._buffers = _Buffers()
        self._postponed: dict[tuple[int, int], _Postponed] = {}
        self._lock = threading.Lock()
        self._has_complained = False

    def room_for(self, expected_bytes: int) -> MemoryRoom:
        return MemoryRoom(max(0, expected_bytes - self._buffers.bytes), available_memory())

    def admitted(self, rooms: Sequence[MemoryRoom]) -> Staging:
        needed = sum(room.needed for room in rooms)
        available = min(room.available for room in rooms)
        if needed <= USABLE_MEMORY * available:
            return self
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "staging='memory' needs %d bytes more on this node for its %d ranks, and %d are available: such saves "
                "are written to the disk while training stands still.",
                needed,
                len(rooms),
                available,
            )
        return Staging()

    @contextlib.contextmanager
    def writing(self, staged: Path) -> Iterator[Path]:
        self.clear()
        with _hooks(self, staged):
            yield staged
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._find_renamed(staged)

    def bring(self, staged: Path) -> None:
        for file in self._postponed.values():
            file.bring()

    def clear(self) -> None:
        self._postponed.clear()
        self._buffers.give_back()

    # --- for the hooks ---

    def archive(self) -> _Archive:
        return _Archive(self._buffers)

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._buffers.copy(storage)

    def copy_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._buffers.copy_tensor(tensor) for name, tensor in tensors.items()}

    def postpone(self, path: str, write: Callable[[str], None]) -> None:
        """Let ``write(path)`` wait. Another file that was to be written there is forgotten, as if overwritten."""
        with open(path, "wb") as stream:
            info = os.fstat(stream.fileno())
        with self._lock:
            inode = info.st_dev, info.st_ino
            self._postponed[inode] = _Postponed(os.path.abspath(path), inode, write)

    def _find_renamed(self, staged: Path) -> None:
        """Follow the files that were renamed, and forget those that were removed."""
        lost = [file for file in self._postponed.values() if _inode(file.path) != file.inode]
        if not lost:
            return
        places = {_inode(str(staged / path)): str(staged / path) for path in list_files(staged)}
        for file in lost:
            if file.inode in places:
                file.path = places[file.inode]
            else:
                del self._postponed[file.inode]


def _inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


@contextlib.contextmanager
def _hooks(memory: InMemory, staged: Path) -> Iterator[None]:
    """For the time of a save, what is serialized into a file below ``staged`` goes to ``memory``."""
    root = os.path.realpath(staged) + os.sep
    real_open = _torch_files._open_zipfile_writer
    real_cpu: Any = torch.UntypedStorage.cpu
    recording = threading.local()
    real_flatten = _safetensors._flatten_as_ptr
    real_serialize = _safetensors.serialize_file
    real_save_file = _safetensors.save_file
    flattened: dict[int, dict[str, torch.Tensor]] = {}

    def is_ours(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.realpath(os.fspath(path)).startswith(root)

    @contextlib.contextmanager
    def record(path: str) -> Iterator[_Archive]:
        archive = memory.archive()
        recording.now = True
        try:
            yield archive
        finally:
            recording.now = False
        memory.postpone(path, archive.write)

    def open_zipfile_writer(name_or_buffer: Any) -> Any:
        return record(os.fspath(name_or_buffer)) if is_ours(name_or_buffer) else real_open(name_or_buffer)

    def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        # torch.save brings each storage of a GPU here right before it hands it to the archive.
        is_for_archive = storage.device.type != "cpu" and getattr(recording, "now", False)
        return memory.copy(storage) if is_for_archive else cast(torch.UntypedStorage, real_cpu(storage))

    def flatten(tensors: dict[str, torch.Tensor], keep_alive: list[Any]) -> Any:
        _safetensors._evaluate_tensors_for_save(tensors)
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            return real_flatten(tensors, keep_alive)  # which says what is wrong
        copies = memory.copy_tensors(tensors)
        specs = real_flatten(copies, keep_alive)
        flattened[id(specs)] = copies
        return specs

    def serialize_file(specs: Any, filename: Any, metadata: Any = None) -> None:
        copies = flattened.pop(id(specs), None)
        if copies is None or not is_ours(filename):
            real_serialize(specs, filename, metadata=metadata)
        else:
            memory.postpone(os.fspath(filename), lambda path: real_save_file(copies, path, metadata=metadata))

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(_torch_files, "_open_zipfile_writer", open_zipfile_writer))
        stack.enter_context(_replaced(torch.UntypedStorage, "cpu", cpu))
        stack.enter_context(_replaced(_safetensors, "_flatten_as_ptr", flatten))
        stack.enter_context(_replaced(_safetensors, "serialize_file", serialize_file))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def memory_problem() -> str | None:
    """Why files cannot be put together in memory with the installed torch and safetensors, or None where they can.

    Both are tried with a small checkpoint, since what is replaced for it is not part of what they promise.
    """
    base = torch.arange(6, dtype=torch.float32)
    tensors = {"weight": base.clone(), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0)}

    def save(directory: Path) -> None:
        torch.save({"all": base, "part": base[2:], "more": [1, "two", None]}, directory / "state.pt")
        _safetensors.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    try:
        with tempfile.TemporaryDirectory(prefix="safe_trainer-") as name:
            direct, staged = Path(name, "direct"), Path(name, "staged")
            direct.mkdir()
            staged.mkdir()
            save(direct)
            memory = InMemory()
            with memory.writing(staged) as place:
                save(place)
            if any(path.stat().st_size for path in staged.iterdir()):
                return "they write past the places that are known"
            memory.bring(staged)
            different = [
                path.name for path in direct.iterdir() if path.read_bytes() != (staged / path.name).read_bytes()
            ]
            return f"{', '.join(different)} came out different" if different else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def staging_of(choice: str, *, run_directory: Path, index: int, count: int) -> Staging:
    """What the option ``staging`` says, for a rank that is the ``index``-th of ``count`` on its node.

    Raises:
        OptionError: the directory that it names cannot be written to.
    """
    if choice == ON_DISK:
        return Staging()
    if choice != IN_MEMORY:
        return InDirectory(Path(choice), run_directory=run_directory, index=index, count=count)
    problem = memory_problem()
    if problem is None:
        return InMemory()
    logger.warning("staging='memory' does not work with this torch and safetensors (%s): files are written.", problem)
    return Staging()
