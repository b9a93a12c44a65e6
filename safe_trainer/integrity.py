"""Is this file, or this checkpoint, what it claims to be: the one place that decides "complete".

With a manifest, files are compared with it. Without one (a checkpoint of the stock Trainer) structure decides:
safetensors headers, zip directories of torch files, JSON, and the set of shards that the saved world size implies.
Nothing is unpickled here: pickles are only scanned for the strings and numbers that they contain.
"""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import xxhash

from safe_trainer.errors import CheckpointError
from safe_trainer.layout import (
    JIT_SENTINEL_NAME,
    TRAINER_STATE_NAME,
    FileStat,
    list_files,
    resolve_inside,
)
from safe_trainer.manifest import FileEntry, Manifest
from safe_trainer.options import Verify

READ_BYTES = 4 << 20
# The format's own limit: a longer header is not a safetensors file (huggingface/safetensors, MAX_HEADER_SIZE).
SAFETENSORS_MAX_HEADER_BYTES = 100_000_000

_RNG_RE = re.compile(r"^rng_state_(\d+)\.pth$")
_DEEPSPEED_OPTIMIZER_RE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


@dataclass(frozen=True)
class Verdict:
    """What was found about one checkpoint directory.

    Attributes:
        manifest: its manifest, where it has a readable one.
        problems: why it is not complete, one phrase each; empty where it is.
    """

    manifest: Manifest | None
    problems: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.problems

    @property
    def is_part(self) -> bool:
        return self.manifest is not None and self.manifest.scope == "part"


def digest_file(path: Path) -> str:
    """The xxh3-128 digest of a file's content as 32 hexadecimal digits; reads it once, in bounded memory."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def inspect_checkpoint(checkpoint: Path, *, verify: Verify) -> Verdict:
    """Judge ``checkpoint`` as far as one process can do cheaply: everything except digests.

    Digests take a read of every byte, so resuming spreads them over ranks (:func:`file_problem` on each file).

    Args:
        checkpoint: the directory.
        verify: ``digest`` also reads torch and safetensors files of a stock checkpoint in full; ``off`` only asks
            whether the files are there.
    """
    try:
        manifest = Manifest.read(checkpoint)
        files = list_files(checkpoint)
    except (CheckpointError, OSError) as error:
        return Verdict(None, (str(error),))
    if JIT_SENTINEL_NAME in files:
        return Verdict(manifest, (f"{JIT_SENTINEL_NAME} says that its save did not finish",))
    if manifest is None:
        return Verdict(None, tuple(_stock_problems(checkpoint, files, verify)))
    problems = [
        problem
        for entry in manifest.files
        if (problem := _listed_file_problem(entry, files.get(entry.path), verify)) is not None
    ]
    if manifest.scope == "part":
        problems.insert(0, "it is the part that one node wrote; the whole checkpoint is on another disk")
    return Verdict(manifest, tuple(problems))


def _listed_file_problem(entry: FileEntry, found: FileStat | None, verify: Verify) -> str | None:
    if found is None:
        return f"{entry.path} is missing"
    if verify != "off" and found.size != entry.size:
        return f"{entry.path} has {found.size} bytes instead of {entry.size}"
    return None


def file_problem(checkpoint: Path, entry: FileEntry) -> str | None:
    """Compare one file with its entry, digest included; None where it is right. Reads the whole file."""
    try:
        path = resolve_inside(checkpoint, entry.path)
        size = path.stat().st_size
        if size != entry.size:
            return f"{entry.path} has {size} bytes instead of {entry.size}"
        if digest_file(path) != entry.digest:
            return f"{entry.path} has other content than when it was saved (digest differs)"
    except (OSError, CheckpointError) as error:
        return f"{entry.path}: {error}"
    return None


def tensorless_weights(checkpoint: Path, paths: Iterable[str]) -> list[str]:
    """Safetensors files among ``paths`` that hold no tensor at all (seen with LoRA under ZeRO-3 on transformers 4)."""
    empty = []
    for path in paths:
        if path.endswith(".safetensors"):
            header = _safetensors_header(checkpoint / path)
            if isinstance(header, dict) and not set(header) - {"__metadata__"}:
                empty.append(path)
    return empty


# --- structure, where there is no manifest ---


def _stock_problems(checkpoint: Path, files: dict[str, FileStat], verify: Verify) -> list[str]:
    problems = []
    if TRAINER_STATE_NAME not in files:
        problems.append(f"{TRAINER_STATE_NAME}, which the stock Trainer writes last, is missing")
    problems += _missing_weights(files)
    problems += _missing_training_state(files)
    problems += _missing_shards(checkpoint, files)
    if verify != "off":
        problems += [
            f"{path}: {problem}"
            for path in files
            if (problem := structure_problem(checkpoint / path, thorough=verify == "digest")) is not None
        ]
    return problems


def _missing_weights(files: dict[str, FileStat]) -> list[str]:
    names = {PurePosixPath(path).name for path in files}
    weights = any(name.endswith((".safetensors", ".bin", ".distcp")) and name != "training_args.bin" for name in names)
    deepspeed = any(name.endswith("model_states.pt") for name in names)
    return [] if weights or deepspeed else ["there are no model weights"]


def _missing_training_state(files: dict[str, FileStat]) -> list[str]:
    """A save with RNG states also saves optimizer and scheduler; without them training would silently start cold."""
    has_rng = "rng_state.pth" in files or any(_RNG_RE.match(path) for path in files)
    deepspeed = any(path.startswith("global_step") for path in files)
    if not has_rng or deepspeed:
        return []
    problems = []
    if not any(path.startswith(("optimizer.", "optimizer_")) for path in files):
        problems.append("optimizer.pt is missing")
    if "scheduler.pt" not in files:
        problems.append("scheduler.pt is missing")
    return problems


def _missing_shards(checkpoint: Path, files: dict[str, FileStat]) -> list[str]:
    problems = []
    for path in files:
        name = PurePosixPath(path).name
        if name.endswith(".index.json"):
            problems += _missing_from_index(checkpoint, path, files)
        elif name == ".metadata":
            parent = PurePosixPath(path).parent
            shards = (str(parent / shard) for shard in _strings_in_pickle(checkpoint / path, suffix=".distcp"))
            problems += [f"{shard} is missing (listed in {path})" for shard in sorted(shards) if shard not in files]
    folders_with_shards = {str(PurePosixPath(path).parent) for path in files if path.endswith(".distcp")}
    for folder in sorted(folders_with_shards):
        if f"{folder}/.metadata" not in files:
            problems.append(f"{folder}/.metadata is missing")
    problems += _missing_rng_states(files)
    problems += _missing_deepspeed_files(checkpoint, files)
    return problems


def _missing_from_index(checkpoint: Path, index: str, files: dict[str, FileStat]) -> list[str]:
    try:
        weight_map = json.loads((checkpoint / index).read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index} cannot be read: {error!r}"]
    paths = [str(PurePosixPath(index).parent / shard) for shard in shards]
    return [f"{path} is missing (listed in {index})" for path in paths if path not in files]


def _missing_rng_states(files: dict[str, FileStat]) -> list[str]:
    ranks = {int(match.group(1)) for path in files if (match := _RNG_RE.match(path))}
    return [f"rng_state_{rank}.pth is missing" for rank in range(max(ranks, default=-1)) if rank not in ranks]


def _missing_deepspeed_files(checkpoint: Path, files: dict[str, FileStat]) -> list[str]:
    if not any(path.startswith("global_step") for path in files):
        return []
    if "latest" not in files:
        return ["latest is missing (DeepSpeed would load nothing)"]
    try:
        tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        return [f"latest cannot be read: {error}"]
    folder = [path for path in files if path.startswith(f"{tag}/")]
    if not folder:
        return [f"{tag}/, which latest names, is missing"]
    problems = []
    if not any(path.endswith("model_states.pt") for path in folder):
        problems.append(f"{tag}/ has no model states")
    ranks = {int(match.group(1)) for path in folder if (match := _DEEPSPEED_OPTIMIZER_RE.search(path))}
    expected = saved_world_size(checkpoint, files)
    if ranks and expected is not None:
        problems += [
            f"{tag}/: the optimizer shard of rank {rank} of {expected} is missing"
            for rank in range(expected)
            if rank not in ranks
        ]
    return problems


def saved_world_size(checkpoint: Path, files: dict[str, FileStat]) -> int | None:
    """The data-parallel world size that DeepSpeed recorded, else the highest rank with an RNG state plus 1."""
    for path in files:
        if path.endswith("model_states.pt"):
            size = _number_in_torch_file(checkpoint / path, key="dp_world_size")
            if size is not None:
                return size
    ranks = [int(match.group(1)) for path in files if (match := _RNG_RE.match(path))]
    return max(ranks) + 1 if ranks else None


def structure_problem(path: Path, *, thorough: bool) -> str | None:
    """What is wrong with a file, judged by its own format; None where nothing is, or the format is not known.

    Args:
        path: the file.
        thorough: also compare the checksums of every record in a torch (zip) file, which reads all of it.
    """
    try:
        if path.name.endswith(".safetensors"):
            header = _safetensors_header(path)
            return header if isinstance(header, str) else None
        if path.name.endswith(".json"):
            json.loads(path.read_text(encoding="utf-8"))
        elif path.name.endswith((".pt", ".pth", ".bin", ".distcp")):
            return _torch_file_problem(path, thorough=thorough)
        elif path.name == ".metadata":
            with open(path, "rb") as stream:
                for _ in pickletools.genops(stream):
                    pass
    except (OSError, ValueError) as error:
        return f"is damaged or truncated ({type(error).__name__}: {error})"
    return None


def _safetensors_header(path: Path) -> dict[str, object] | str:
    """The header of a safetensors file, or what is wrong with it."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return "is too short for a safetensors header"
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(SAFETENSORS_MAX_HEADER_BYTES, size - 8):
            return f"is truncated: the header alone needs {header_bytes} bytes"
        try:
            header = json.loads(stream.read(header_bytes))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return f"has a damaged safetensors header: {error!r}"
    expected = 8 + header_bytes + max(ends, default=0)
    return header if size == expected else f"has {size} bytes, its header describes {expected}"


def _torch_file_problem(path: Path, *, thorough: bool) -> str | None:
    if path.stat().st_size == 0:
        return "is empty"
    if not _starts_as_zip(path):
        # Torch's format before 1.6, or not torch's at all: nothing to compare it with.
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if thorough else None
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return f"is damaged or truncated: {error}"
    return None if damaged is None else f"is damaged: the checksum of {damaged} differs"


def _starts_as_zip(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _strings_in_pickle(path: Path, *, suffix: str) -> set[str]:
    found: set[str] = set()
    try:
        with open(path, "rb") as stream:
            for _, argument, _ in pickletools.genops(stream):
                if isinstance(argument, str) and argument.endswith(suffix):
                    found.add(argument)
    except (OSError, ValueError):
        # A damaged pickle is reported where the file itself is judged; here it lists nothing further.
        return found
    return found


def _number_in_torch_file(path: Path, *, key: str) -> int | None:
    """The integer that follows the string ``key`` in a torch file's pickle, read without unpickling."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if name is None:
                return None
            with archive.open(name) as stream:
                return _number_after(stream, key)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def _number_after(stream: IO[bytes], key: str) -> int | None:
    seen_key = False
    for opcode, argument, _ in pickletools.genops(stream):
        if argument == key:
            seen_key = True
        elif seen_key and isinstance(argument, int) and "PUT" not in opcode.name:
            return argument
    return None
