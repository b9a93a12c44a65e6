"""integrity: the one place that decides whether a checkpoint is complete (cases U1, U2, U3, U8).

Two ways to know: a manifest (sizes, digests), or, for what the stock Trainer wrote, the files' own structure.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from safe_trainer.digest import digest_file
from safe_trainer.errors import CheckpointError
from safe_trainer.integrity import (
    file_problem,
    inspect_checkpoint,
    saved_world_size,
    structure_problem,
    tensorless_weights,
)
from safe_trainer.layout import JIT_SENTINEL_NAME, MANIFEST_NAME, TRAINER_STATE_NAME, list_files
from safe_trainer.manifest import Manifest
from safe_trainer.options import Verify
from tests.unit.builders import (
    STOCK_KINDS,
    STOCK_WORLD_SIZE,
    TRUNCATIONS,
    deepspeed_model_states,
    flip_byte,
    make_stock_checkpoint,
    manifest_of,
    write_files,
)

Damage = Callable[[Path], None]

# One file of each kind, and a stock checkpoint that has it.
FILES: dict[str, str] = {
    "model.safetensors": "single",
    "optimizer.pt": "single",
    "scheduler.pt": "single",
    "rng_state.pth": "single",
    "training_args.bin": "single",
    "trainer_state.json": "single",
    "config.json": "single",
    "model.safetensors.index.json": "ddp",
    "rng_state_3.pth": "ddp",
    "latest": "zero2",
    "zero_to_fp32.py": "zero2",
    "global_step10/mp_rank_00_model_states.pt": "zero2",
    "global_step10/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt": "zero2",
    "pytorch_model_fsdp_0/.metadata": "fsdp",
    "pytorch_model_fsdp_0/__0_0.distcp": "fsdp",
}
# Formats without a structure of their own: only a digest notices.
SHAPELESS = {"zero_to_fp32.py"}
# The last byte of these is a line feed; without it they say the same.
ENDS_IN_LINE_FEED = {"trainer_state.json", "config.json"}


@pytest.fixture(scope="session")
def stock_templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One stock checkpoint of each kind, not to be changed."""
    return {kind: make_stock_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in STOCK_KINDS}


@pytest.fixture
def stock(stock_templates: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A stock checkpoint of a kind, to be damaged."""

    def make(kind: str) -> Path:
        return Path(shutil.copytree(stock_templates[kind], tmp_path / "checkpoint-10"))

    return make


@pytest.fixture
def sealed(stock: Callable[[str], Path]) -> Callable[[str], Path]:
    """The same with a manifest."""

    def make(kind: str) -> Path:
        checkpoint = stock(kind)
        manifest_of(checkpoint, step=10).write(checkpoint)
        return checkpoint

    return make


def problems(checkpoint: Path, verify: Verify = "digest") -> str:
    return "\n".join(inspect_checkpoint(checkpoint, verify=verify).problems)


def digest_problems(checkpoint: Path) -> list[str]:
    """What reading every byte finds, as resuming does it."""
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    return [problem for entry in manifest.files if (problem := file_problem(checkpoint, entry)) is not None]


# --- digests ---


@pytest.mark.parametrize("content", [b"", b"x", b"0123456789" * 1000])
def test_the_digest_is_xxh3_128(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == xxhash.xxh3_128(content).hexdigest()


def test_a_file_larger_than_one_read_is_digested_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_trainer.digest.READ_BYTES", 7)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert digest_file(tmp_path / "file") == xxhash.xxh3_128(b"0123456789").hexdigest()


# --- with a manifest ---


@pytest.mark.parametrize("kind", STOCK_KINDS)
@pytest.mark.parametrize("verify", ["off", "size", "digest"])
def test_a_healthy_checkpoint_with_a_manifest_is_complete(
    sealed: Callable[[str], Path], kind: str, verify: Verify
) -> None:
    checkpoint = sealed(kind)
    verdict = inspect_checkpoint(checkpoint, verify=verify)
    assert verdict.complete
    assert verdict.manifest == Manifest.read(checkpoint)
    assert not verdict.is_part


@pytest.mark.parametrize("damage", TRUNCATIONS.values(), ids=TRUNCATIONS)
@pytest.mark.parametrize("path", FILES)
def test_with_a_manifest_every_truncation_is_seen_by_size(
    sealed: Callable[[str], Path], path: str, damage: Damage
) -> None:
    checkpoint = sealed(FILES[path])
    damage(checkpoint / path)
    assert f"{path} has " in problems(checkpoint, "size")


@pytest.mark.parametrize("path", FILES)
def test_with_a_manifest_a_flipped_byte_is_seen_by_digest(sealed: Callable[[str], Path], path: str) -> None:
    checkpoint = sealed(FILES[path])
    flip_byte(checkpoint / path)
    assert [problem.split()[0] for problem in digest_problems(checkpoint)] == [path]


@pytest.mark.parametrize("verify", ["off", "size", "digest"])
@pytest.mark.parametrize("path", FILES)
def test_with_a_manifest_every_missing_file_is_named(sealed: Callable[[str], Path], path: str, verify: Verify) -> None:
    checkpoint = sealed(FILES[path])
    (checkpoint / path).unlink()
    assert problems(checkpoint, verify) == f"{path} is missing"


def test_files_that_were_added_after_the_commit_do_no_harm(sealed: Callable[[str], Path]) -> None:
    checkpoint = sealed("single")
    write_files(checkpoint, {"README.md": b"a model card", "notes/mine.txt": b""})
    assert inspect_checkpoint(checkpoint, verify="digest").complete


@pytest.mark.parametrize("damage", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_a_damaged_manifest_is_a_problem_and_not_a_stock_checkpoint(
    sealed: Callable[[str], Path], damage: Damage
) -> None:
    checkpoint = sealed("single")
    content = (checkpoint / MANIFEST_NAME).read_text().rstrip()
    (checkpoint / MANIFEST_NAME).write_text(content)
    damage(checkpoint / MANIFEST_NAME)
    assert MANIFEST_NAME in problems(checkpoint)


def test_a_part_is_not_complete_and_says_what_it_is(stock: Callable[[str], Path]) -> None:
    checkpoint = stock("zero2")
    manifest_of(checkpoint, scope="part").write(checkpoint)
    verdict = inspect_checkpoint(checkpoint, verify="digest")
    assert verdict.is_part
    assert not verdict.complete
    assert "another disk" in verdict.problems[0]


@pytest.mark.parametrize("verify", ["off", "size", "digest"])
def test_the_sentinel_of_a_just_in_time_checkpoint_says_unfinished(
    sealed: Callable[[str], Path], verify: Verify
) -> None:
    checkpoint = sealed("single")
    (checkpoint / JIT_SENTINEL_NAME).touch()
    assert JIT_SENTINEL_NAME in problems(checkpoint, verify)


def test_an_unsafe_path_in_the_manifest_is_a_problem(sealed: Callable[[str], Path]) -> None:
    checkpoint = sealed("single")
    text = (checkpoint / MANIFEST_NAME).read_text()
    (checkpoint / MANIFEST_NAME).write_text(text.replace('"optimizer.pt"', '"../optimizer.pt"'))
    assert "../optimizer.pt" in problems(checkpoint)


@pytest.mark.parametrize("target", ["/etc/passwd", "../elsewhere", "loop"])
def test_a_link_that_leads_nowhere_good_is_a_problem(sealed: Callable[[str], Path], target: str) -> None:
    checkpoint = sealed("single")
    (checkpoint / "loop").symlink_to(target)
    assert "loop" in problems(checkpoint)


def test_a_file_that_became_a_link_out_is_a_problem_for_the_digest_too(sealed: Callable[[str], Path]) -> None:
    checkpoint = sealed("single")
    shutil.move(checkpoint / "optimizer.pt", checkpoint.parent / "optimizer.pt")
    (checkpoint / "optimizer.pt").symlink_to("../optimizer.pt")
    assert any("optimizer.pt" in problem for problem in digest_problems(checkpoint))


def test_a_directory_that_is_not_there_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    assert not inspect_checkpoint(tmp_path / "checkpoint-1", verify="digest").complete


# --- without one: the stock Trainer's checkpoints ---


@pytest.mark.parametrize("kind", STOCK_KINDS)
@pytest.mark.parametrize("verify", ["off", "size", "digest"])
def test_a_healthy_stock_checkpoint_is_complete(stock: Callable[[str], Path], kind: str, verify: Verify) -> None:
    verdict = inspect_checkpoint(stock(kind), verify=verify)
    assert verdict.problems == ()
    assert verdict.manifest is None


def test_torch_files_of_the_old_format_are_accepted(stock: Callable[[str], Path]) -> None:
    checkpoint = stock("single")
    torch.save({"last_epoch": 1}, checkpoint / "scheduler.pt", _use_new_zipfile_serialization=False)
    assert inspect_checkpoint(checkpoint, verify="digest").complete


def _noticeable_truncations() -> Iterator[tuple[str, str]]:
    for path in sorted(FILES.keys() - SHAPELESS):
        for damage in TRUNCATIONS:
            if not (path in ENDS_IN_LINE_FEED and damage == "last byte gone"):
                yield path, damage


@pytest.mark.parametrize(("path", "damage"), list(_noticeable_truncations()))
@pytest.mark.parametrize("verify", ["size", "digest"])
def test_a_truncated_stock_file_is_found_by_its_structure(
    stock: Callable[[str], Path], path: str, damage: str, verify: Verify
) -> None:
    checkpoint = stock(FILES[path])
    TRUNCATIONS[damage](checkpoint / path)
    assert path.rpartition("/")[2] in problems(checkpoint, verify)


@pytest.mark.parametrize(
    "path", ["optimizer.pt", "rng_state_3.pth", "training_args.bin", "global_step10/mp_rank_00_model_states.pt"]
)
def test_a_flipped_byte_in_a_stock_torch_file_is_found_when_every_byte_is_read(
    stock: Callable[[str], Path], path: str
) -> None:
    checkpoint = stock(FILES.get(path, "single"))
    data = (checkpoint / path).read_bytes()
    flip_byte(checkpoint / path, data.index(b"data.pkl") + 100)
    assert path in problems(checkpoint, "digest")


@pytest.mark.parametrize("at", range(4))
def test_a_torch_file_whose_first_bytes_are_wrong_is_not_taken_for_the_old_format(
    stock: Callable[[str], Path], at: int
) -> None:
    checkpoint = stock("single")
    flip_byte(checkpoint / "optimizer.pt", at, mask=0xFF)
    assert "optimizer.pt" in problems(checkpoint)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_a_torch_file_of_a_few_bytes_is_damaged(stock: Callable[[str], Path], left: int) -> None:
    checkpoint = stock("single")
    os.truncate(checkpoint / "optimizer.pt", left)
    assert "optimizer.pt" in problems(checkpoint)


def _files_of(kind: str) -> Iterator[tuple[str, str]]:
    """What must be in a stock checkpoint of a kind: (kind, path)."""
    ranks = range(STOCK_WORLD_SIZE)
    rng = ["rng_state.pth"] if kind == "single" else [f"rng_state_{rank}.pth" for rank in ranks]
    shards = [f"global_step10/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
    states = [f"global_step10/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
    distributed = ["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"]
    of_kind = {
        "single": ["model.safetensors", "optimizer.pt", "scheduler.pt", *rng],
        # The last rank's is missing unnoticed: nothing else in such a checkpoint tells how many ranks there were.
        "ddp": ["optimizer.pt", "scheduler.pt", "model-00002-of-00002.safetensors", *rng[:-1]],
        "zero2": ["latest", "global_step10/mp_rank_00_model_states.pt", *shards, *rng],
        "zero3": ["latest", *states, *shards, *rng],
        "fsdp": [*distributed, "optimizer_0/__0_1.distcp", "optimizer_0/.metadata", "scheduler.pt", *rng[:-1]],
        "model-only": ["model.safetensors"],
    }
    for path in [TRAINER_STATE_NAME, *of_kind[kind]]:
        yield kind, path


@pytest.mark.parametrize(("kind", "path"), [row for kind in STOCK_KINDS for row in _files_of(kind)])
@pytest.mark.parametrize("verify", ["off", "size"])
def test_a_missing_stock_file_makes_it_incomplete(
    stock: Callable[[str], Path], kind: str, path: str, verify: Verify
) -> None:
    checkpoint = stock(kind)
    (checkpoint / path).unlink()
    assert not inspect_checkpoint(checkpoint, verify=verify).complete


@pytest.mark.parametrize(
    ("kind", "directory"), [("fsdp", "pytorch_model_fsdp_0"), ("fsdp", "optimizer_0"), ("zero2", "global_step10")]
)
def test_a_missing_directory_makes_it_incomplete(stock: Callable[[str], Path], kind: str, directory: str) -> None:
    checkpoint = stock(kind)
    shutil.rmtree(checkpoint / directory)
    assert not inspect_checkpoint(checkpoint, verify="off").complete


def test_shards_directly_in_the_checkpoint_are_complete_with_their_metadata(
    stock: Callable[[str], Path],
) -> None:
    checkpoint = stock("fsdp")
    for path in (checkpoint / "pytorch_model_fsdp_0").iterdir():
        path.rename(checkpoint / path.name)
    assert problems(checkpoint) == ""


def test_a_just_in_time_checkpoint_that_was_cut_off_is_incomplete(stock: Callable[[str], Path]) -> None:
    checkpoint = stock("single")
    (checkpoint / JIT_SENTINEL_NAME).touch()
    assert JIT_SENTINEL_NAME in problems(checkpoint)


def test_an_empty_directory_is_incomplete(tmp_path: Path) -> None:
    assert not inspect_checkpoint(tmp_path, verify="off").complete


def test_what_latest_names_must_be_there(stock: Callable[[str], Path]) -> None:
    checkpoint = stock("zero2")
    (checkpoint / "latest").write_text("global_step20")
    assert "global_step20" in problems(checkpoint)


# --- a damaged file is a finding, never an exception: otherwise it would end every resume ---


def _every_flip(path: Path, *, mask: int) -> Iterator[None]:
    """Yield with one byte of ``path`` flipped after the other; in a long file only near its ends, where formats are."""
    original = path.read_bytes()
    near_ends = {*range(min(100, len(original))), *range(max(0, len(original) - 600), len(original))}
    for at in sorted(near_ends):
        changed = bytearray(original)
        changed[at] ^= mask
        path.write_bytes(changed)
        yield


@pytest.mark.parametrize("mask", [0x01, 0x08])
@pytest.mark.parametrize("path", ["scheduler.pt", "model.safetensors", "config.json"])
def test_no_flipped_byte_makes_the_judge_fail(stock: Callable[[str], Path], path: str, mask: int) -> None:
    checkpoint = stock("single")
    for _ in _every_flip(checkpoint / path, mask=mask):
        structure_problem(checkpoint / path, thorough=True)


def test_no_flipped_byte_in_shard_metadata_makes_the_judge_fail(stock: Callable[[str], Path]) -> None:
    folder = stock("fsdp") / "pytorch_model_fsdp_0"
    for _ in _every_flip(folder / ".metadata", mask=0x01):
        inspect_checkpoint(folder, verify="off")
        structure_problem(folder / ".metadata", thorough=True)


def test_no_flipped_byte_in_model_states_makes_the_world_size_fail(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"dp_world_size": 4}, path)
    files = list_files(tmp_path)
    for _ in _every_flip(path, mask=0x01):
        saved_world_size(tmp_path, files)


@pytest.mark.parametrize(
    "index", ["null", "[]", '{"weight_map": null}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}', "{"]
)
def test_an_index_that_makes_no_sense_is_a_finding(stock: Callable[[str], Path], index: str) -> None:
    checkpoint = stock("ddp")
    (checkpoint / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in problems(checkpoint)


# --- safetensors ---


def test_whatever_safetensors_refuses_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4, 2), "b": torch.zeros(3)}, path)
    unnoticed = []
    for number, _ in enumerate(_every_flip(path, mask=0x02)):
        try:
            with safe_open(path, framework="pt") as weights:
                weights.keys()
        except SafetensorError:
            if structure_problem(path, thorough=False) is None:
                unnoticed.append(number)
    assert unnoticed == []


@pytest.mark.parametrize("header", [b"[]", b"5", b'{"a": 1}', b'{"a": {"data_offsets": [0, "x"]}}', b"{}junk", b"\xff"])
def test_a_safetensors_header_that_makes_no_sense_is_a_finding(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert structure_problem(path, thorough=False) is not None


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 200_000_000])
def test_a_header_that_claims_to_be_huge_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert structure_problem(path, thorough=False) is not None


def test_weights_without_a_tensor_are_noticed(tmp_path: Path) -> None:
    save_file({}, tmp_path / "adapter_model.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    paths = ["adapter_model.safetensors", "model.safetensors", "optimizer.pt"]
    assert tensorless_weights(tmp_path, paths) == ["adapter_model.safetensors"]


def test_damaged_weights_are_an_error_that_names_them(tmp_path: Path) -> None:
    write_files(tmp_path, {"model.safetensors": b"x" * 100})
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        tensorless_weights(tmp_path, ["model.safetensors"])


# --- the world size that saved it ---


@pytest.mark.parametrize("world_size", [1, 4, 255, 256, 300, 70_000])
def test_deepspeed_model_states_tell_the_world_size(tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "global_step10"
    folder.mkdir()
    torch.save(deepspeed_model_states(world_size), folder / "mp_rank_00_model_states.pt")
    assert saved_world_size(tmp_path, list_files(tmp_path)) == world_size


@pytest.mark.parametrize(
    ("names", "world_size"),
    [
        ([], None),
        (["rng_state.pth"], 1),
        (["rng_state_0.pth", "rng_state_1.pth"], 2),
        ([f"rng_state_{rank}.pth" for rank in range(11)], 11),
    ],
)
def test_else_the_rng_states_tell_it(tmp_path: Path, names: list[str], world_size: int | None) -> None:
    write_files(tmp_path, dict.fromkeys(names, b""))
    assert saved_world_size(tmp_path, list_files(tmp_path)) == world_size


# --- nothing is unpickled ---


class _RunsWhenUnpickled:
    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._victim),)


@pytest.mark.parametrize(
    "path",
    [
        "optimizer.pt",
        "rng_state.pth",
        "training_args.bin",
        "pytorch_model.bin",
        "global_step10/mp_rank_00_model_states.pt",
        "pytorch_model_fsdp_0/.metadata",
        "pytorch_model_fsdp_0/__0_0.distcp",
    ],
)
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, path: str, as_zip: bool) -> None:
    victim = tmp_path / "victim"
    checkpoint = tmp_path / "checkpoint-10"
    (checkpoint / path).parent.mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step10")
    bomb = {"dp_world_size": _RunsWhenUnpickled(victim)}
    with open(checkpoint / path, "wb") as stream:
        torch.save(bomb, stream) if as_zip else pickle.dump(bomb, stream)
    inspect_checkpoint(checkpoint, verify="digest")
    saved_world_size(checkpoint, list_files(checkpoint))
    assert not victim.exists()
    with open(checkpoint / path, "rb") as stream:
        torch.load(stream, weights_only=False) if as_zip else pickle.load(stream)
    assert victim.exists(), "the bomb of this test is a dud"


def test_json_is_not_evaluated_but_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert structure_problem(tmp_path / "config.json", thorough=True) is None
