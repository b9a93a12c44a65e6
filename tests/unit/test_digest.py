"""digest: of a whole file, of its blocks, in whatever pieces it comes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from safe_trainer import digest
from safe_trainer.digest import (
    BlockDigester,
    block_count,
    combine,
    digest_blocks,
    digest_file,
    share_out,
    united,
    whole_blocks,
)
from safe_trainer.errors import CheckpointError

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(digest, "READ_BYTES", 300)


def by_hand(content: bytes) -> str:
    blocks = [content[start : start + BLOCK] for start in range(0, max(len(content), 1), BLOCK)]
    if len(blocks) == 1:
        return str(xxhash.xxh3_128(content).hexdigest())
    return str(xxhash.xxh3_128(b"".join(xxhash.xxh3_128(block).digest() for block in blocks)).hexdigest())


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7])
def test_of_a_file(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == by_hand(content)
    assert len(digest_blocks(tmp_path / "file")) == block_count(size)


@pytest.mark.parametrize("step", [1, 7, 999, 1000, 1001, 5000])
def test_of_a_stream_in_any_pieces(step: int) -> None:
    content = os.urandom(3 * BLOCK + 7)
    digester = BlockDigester()
    for start in range(0, len(content), step):
        digester.update(memoryview(content)[start : start + step])
    assert combine(digester.finish()) == by_hand(content)


def test_stretches_of_a_file_give_its_digest_together(tmp_path: Path) -> None:
    content = os.urandom(5 * BLOCK + 7)
    (tmp_path / "file").write_bytes(content)
    first = digest_blocks(tmp_path / "file", offset=0, length=2 * BLOCK)
    second = digest_blocks(tmp_path / "file", offset=2 * BLOCK, length=3 * BLOCK + 7)
    assert combine({**second, **first}) == by_hand(content)
    assert united([{"a": first}, {"b": {}}, {"a": second}]) == {"a": {**first, **second}, "b": {}}


@pytest.mark.parametrize("sizes", [(0,), (100, 0, 50), (10 * BLOCK,), (10 * BLOCK + 1, 3, 3 * BLOCK, 999)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_work_is_shared_by_blocks(sizes: tuple[int, ...], count: int) -> None:
    files = {f"file-{number}": size for number, size in enumerate(sizes)}
    load = dict.fromkeys(range(count), 0)
    stretches = share_out(files, load)
    for path, size in files.items():
        own = sorted((stretch.offset, stretch.length) for stretch in stretches if stretch.path == path)
        assert [offset for offset, _ in own] == [0, *(offset + length for offset, length in own)][: len(own)]
        assert sum(length for _, length in own) == size
        assert all(offset % BLOCK == 0 for offset, _ in own)
        assert len(own) <= count
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) <= sum(sizes) / count + BLOCK * len(sizes)


def test_who_has_something_to_do_already_gets_less() -> None:
    stretches = share_out({"a": 100, "b": 90}, load := {4: 1000, 7: 0})
    assert [stretch.rank for stretch in stretches] == [7, 7]
    assert load == {4: 1000, 7: 190}


def test_what_was_digested_in_part_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * BLOCK))
    with pytest.raises(CheckpointError, match="in part"):
        combine(digest_blocks(tmp_path / "file", offset=BLOCK, length=BLOCK))
    with pytest.raises(CheckpointError, match="in part"):
        combine({})


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"file ends 20 bytes earlier"):
        digest_blocks(tmp_path / "file", length=120)


def test_a_stretch_begins_with_a_block() -> None:
    with pytest.raises(ValueError, match="byte 999"):
        BlockDigester(999)


def test_whole_blocks() -> None:
    assert [whole_blocks(length) for length in (0, 1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, BLOCK, 2 * BLOCK]


def test_an_error_of_reading_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory") as caught:
        digest_file(tmp_path)
    assert caught.value.filename == str(tmp_path)
