"""The digest of a file: xxh3-128, by blocks where the file is long.

The digest of a file of up to :data:`BLOCK_BYTES` is that of its content. A longer one is digested block by block, and
its digest is that of its blocks' digests (16 bytes each, big-endian), one after another. So the work on one file can be
shared, and a file can arrive in stretches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from safe_trainer.disk import again_if_stale, naming
from safe_trainer.errors import CheckpointError

BLOCK_BYTES = 64 << 20
DIGEST_BYTES = 16
READ_BYTES = 4 << 20

# The digests of a file's blocks, or of some of them, by the block's number; and those of several files, by path.
Blocks = Mapping[int, bytes]
Digests = dict[str, dict[int, bytes]]


class BlockDigester:
    """Digests a stretch of a file as it passes by.

    Args:
        offset: where in the file it begins, in bytes; a multiple of :data:`BLOCK_BYTES`.

    Raises:
        ValueError: the stretch begins in the middle of a block.
    """

    def __init__(self, offset: int = 0) -> None:
        self._block, beyond = divmod(offset, BLOCK_BYTES)
        if beyond:
            raise ValueError(f"a stretch begins at byte {offset}, which is not the beginning of a block")
        self._blocks: dict[int, bytes] = {}
        self._hash = xxhash.xxh3_128()
        self._room = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Take in the next bytes."""
        while data:
            part, data = data[: self._room], data[self._room :]
            self._hash.update(part)
            self._room -= len(part)
            if self._room == 0:
                self._end_block()

    def finish(self) -> dict[int, bytes]:
        """The blocks' digests. What is empty has one block."""
        if self._room < BLOCK_BYTES or not self._blocks:
            self._end_block()
        return self._blocks

    def _end_block(self) -> None:
        self._blocks[self._block] = self._hash.digest()
        self._block += 1
        self._hash.reset()
        self._room = BLOCK_BYTES


def block_count(size: int) -> int:
    """How many blocks a file or stretch of ``size`` bytes has; an empty one has one."""
    return max(1, -(-size // BLOCK_BYTES))


def whole_blocks(length: int) -> int:
    """``length`` bytes, rounded up to whole blocks; at least one."""
    return block_count(length) * BLOCK_BYTES


def combine(blocks: Blocks) -> str:
    """The digest of a file with these blocks, as 32 hexadecimal digits.

    Raises:
        CheckpointError: a block is missing.
    """
    if sorted(blocks) != list(range(len(blocks))) or not blocks:
        raise CheckpointError(
            f"a file was digested in part only (blocks {sorted(blocks)}); this is a bug in safe_trainer"
        )
    if len(blocks) == 1:
        return blocks[0].hex()
    return xxhash.xxh3_128(b"".join(blocks[number] for number in range(len(blocks)))).hexdigest()


class Stretch(NamedTuple):
    """A part of a file, in whole blocks, and the rank that digests it; lengths in bytes."""

    path: str
    offset: int
    length: int
    rank: int


def share_out(sizes: Mapping[str, int], load: dict[int, int]) -> list[Stretch]:
    """Share the digesting of files out, so that every rank has as many bytes; long files are cut between blocks.

    Args:
        sizes: of the files, in bytes, by path.
        load: the ranks, and how many bytes each of them has to digest already; the new ones are added.
    """
    stretches = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        step = whole_blocks(-(-size // len(load)))
        for offset in range(0, max(size, 1), step):
            rank = min(load, key=lambda rank: (load[rank], rank))
            length = min(step, size - offset)
            stretches.append(Stretch(path, offset, length, rank))
            load[rank] += length
    return stretches


def united(several: Iterable[Digests]) -> Digests:
    """What several ranks have found out about the same files."""
    all_of_them: Digests = {}
    for digests in several:
        for path, blocks in digests.items():
            all_of_them.setdefault(path, {}).update(blocks)
    return all_of_them


def digest_blocks(path: Path, *, offset: int = 0, length: int | None = None) -> dict[int, bytes]:
    """The digests of a file's blocks, read once, in bounded memory.

    Args:
        path: the file.
        offset, length: of the stretch, in bytes; without a length, up to the end.

    Raises:
        CheckpointError: the file ends before the stretch does.
        OSError: it cannot be read.
    """
    digester = BlockDigester(offset)
    with naming(path), again_if_stale(lambda: open(path, "rb", buffering=0)) as stream:
        size = os.fstat(stream.fileno()).st_size
        # One byte at least, so that the end of what has grown or has no size is still found by reading.
        buffer = memoryview(bytearray(max(1, min(READ_BYTES, size - offset))))
        stream.seek(offset)
        left = length
        while left is None or left > 0:
            count = stream.readinto(buffer if left is None else buffer[:left])
            if not count:
                break
            digester.update(buffer[:count])
            left = None if left is None else left - count
    if left:
        raise CheckpointError(
            f"{path} ends {left} bytes earlier than when it was listed: it changed after it was written"
        )
    return digester.finish()


def digest_file(path: Path) -> str:
    """The digest of a file; reads it once, in bounded memory."""
    return combine(digest_blocks(path))
