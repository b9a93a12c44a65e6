"""Is this file, or this checkpoint, what it claims to be: the one place that decides "complete".

With a manifest, files are compared with it. Without one (a checkpoint of the stock Trainer) structure decides:
safetensors headers, zip directories of torch files, JSON, and the set of shards that the saved world size implies.
Nothing is unpickled here: pickles are only scanned for the strings and numbers that they contain.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from safe_trainer.digest import digest_file
from safe_trainer.errors import CheckpointError
from safe_trainer.layout import (
    JIT_SENTINEL_NAME,
    TRAINER_STATE_NAME,
    FileStat,
    checkpoint_step,
    list_files,
    resolve_inside,
)
from safe_trainer.manifest import FileEntry, Manifest
from safe_trainer.options import Verify

ONLY_A_PART = "it is the part that one node wrote; the whole checkpoint was on another disk"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80\x02"  # torch.save before 1.6, and with _use_new_zipfile_serialization=False
# A name or a number in a damaged file can claim any number of ranks; so many missing ones are listed.
_LISTED_RANKS = 16
_MAX_RANKS = 2**31 - 1
_MAX_TAG_BYTES = 4096
_MAX_ERROR_TEXT = 500

_RNG_RE = re.compile(r"^rng_state_([0-9]{1,9})\.pth$")
_DEEPSPEED_SHARD_RE = re.compile(r"zero_pp_rank_([0-9]{1,9})_mp_rank_[0-9]+_(optim|model)_states\.pt$")


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
        """Whether it is what one disk wrote and kept of a save, with nothing wrong but that."""
        return self.problems == (ONLY_A_PART,)

    @property
    def intact(self) -> bool:
        """Whether it is as it was committed: whole, or a part where only a part was kept."""
        return self.complete or self.is_part


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
        if (problem := _listed_problem(entry, files.get(entry.path), verify)) is not None
    ]
    if checkpoint_step(checkpoint.name) not in (None, manifest.step):
        problems.append(f"its manifest is of step {manifest.step}")
    if manifest.scope == "part":
        problems.insert(0, ONLY_A_PART)
    return Verdict(manifest, tuple(problems))


def _listed_problem(entry: FileEntry, found: FileStat | None, verify: Verify) -> str | None:
    if found is None:
        return f"{entry.path} is missing"
    if verify != "off" and found.size != entry.size:
        return f"{entry.path} has {found.size} bytes instead of {entry.size}"
    return None


def file_problem(checkpoint: Path, entry: FileEntry) -> str | None:
    """Compare one file with its entry, digest included; None where it is right. Reads the whole file."""
    problem = stat_problem(checkpoint, entry)
    if problem is not None:
        return problem
    try:
        if digest_file(resolve_inside(checkpoint, entry.path)) != entry.digest:
            return f"{entry.path} has other content than when it was saved (digest differs)"
    except (OSError, CheckpointError) as error:
        return f"{entry.path}: {error}"
    return None


def stat_problem(checkpoint: Path, entry: FileEntry) -> str | None:
    """Compare one file with its entry, all but its content; None where it is right."""
    try:
        info = resolve_inside(checkpoint, entry.path).stat()
    except (OSError, CheckpointError) as error:
        return f"{entry.path}: {error}"
    if not stat.S_ISREG(info.st_mode):  # reading a pipe would wait for its writer
        return f"{entry.path} is no regular file"
    if info.st_size != entry.size:
        return f"{entry.path} has {info.st_size} bytes instead of {entry.size}"
    return None


def tensorless_weights(checkpoint: Path, paths: Iterable[str]) -> list[str]:
    """Safetensors files among ``paths`` that hold no tensor at all (seen with LoRA under ZeRO-3 on transformers 4).

    Raises:
        CheckpointError: one of them cannot be read.
    """
    weights = [path for path in paths if path.endswith(".safetensors")]
    try:
        return [path for path in weights if not _tensor_names(checkpoint / path)]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights just saved to {checkpoint} cannot be read back: {error}") from error


# --- structure, where there is no manifest ---


def _stock_problems(checkpoint: Path, files: dict[str, FileStat], verify: Verify) -> list[str]:
    replicas = _recorded_size(checkpoint, files, key="dp_world_size")
    problems = []
    if TRAINER_STATE_NAME not in files:
        problems.append(f"{TRAINER_STATE_NAME}, which the stock Trainer writes last, is missing")
    problems += _missing_weights(files)
    problems += _missing_training_state(files)
    problems += _missing_rng_states(files, replicas)
    problems += _missing_deepspeed_files(checkpoint, files, replicas)
    problems += _missing_listed_files(checkpoint, files)
    if verify != "off":
        problems += [
            f"{path}: {problem}"
            for path in files
            if (problem := structure_problem(checkpoint / path, thorough=verify == "digest")) is not None
        ]
    return problems


def _missing_weights(files: dict[str, FileStat]) -> list[str]:
    """Weights are safetensors, .bin, DeepSpeed model states or FSDP shards; not what belongs to the optimizer."""
    suffixes = (".safetensors", ".bin", ".distcp", "model_states.pt")
    weights = [
        path
        for path in files
        if path.endswith(suffixes) and path != "training_args.bin" and not path.startswith("optimizer")
    ]
    return [] if weights else ["there are no model weights"]


def _missing_training_state(files: dict[str, FileStat]) -> list[str]:
    """Optimizer, scheduler and RNG states are saved together or (save_only_model) not at all.

    Without this, a missing one would not be noticed: training would silently start cold.
    """
    optimizer = any(path.startswith(("optimizer.", "optimizer_")) for path in files)
    scheduler = "scheduler.pt" in files
    rng = any(path.startswith("rng_state") for path in files)
    deepspeed = any(path.startswith("global_step") for path in files)
    if not (optimizer or scheduler or rng or deepspeed):
        return []
    problems = []
    if not optimizer and not deepspeed:
        problems.append("optimizer.pt is missing")
    if not scheduler and not deepspeed:
        problems.append("scheduler.pt is missing")
    if not rng:
        problems.append("there are no RNG states")
    return problems


def rng_ranks(names: Iterable[str]) -> set[int]:
    """The ranks of a job of several whose RNG states are among a checkpoint's file names."""
    return {int(match.group(1)) for name in names if (match := _RNG_RE.match(name))}


def _missing_rng_states(files: dict[str, FileStat], replicas: int | None) -> list[str]:
    ranks = rng_ranks(files)
    if not ranks:
        return []
    expected = max(replicas or 0, max(ranks) + 1)
    return list(_absent(ranks, expected, "rng_state_{}.pth is missing"))


def _absent(ranks: set[int], expected: int, text: str) -> Iterator[str]:
    """``text`` with the number of each of the ``expected`` ranks that is not among ``ranks``; of many, the first."""
    missing = (rank for rank in itertools.count() if rank not in ranks)
    first = list(itertools.takewhile(lambda rank: rank < expected, itertools.islice(missing, _LISTED_RANKS)))
    yield from (text.format(rank) for rank in first)
    more = expected - sum(rank < expected for rank in ranks) - len(first)
    if more > 0:
        yield f"so are those of {more} more ranks"


def _missing_deepspeed_files(checkpoint: Path, files: dict[str, FileStat], replicas: int | None) -> list[str]:
    if not any(path.startswith("global_step") for path in files):
        return []
    if "latest" not in files:
        return ["latest is missing (DeepSpeed would load nothing)"]
    try:
        tag = _read_tag(checkpoint / "latest")
    except (OSError, UnicodeDecodeError) as error:
        return [f"latest cannot be read: {error}"]
    folder = [path for path in files if path.startswith(f"{tag}/")]
    if not folder:
        return [f"{tag}/, which latest names, is missing"]
    problems = []
    if not any(path.endswith("model_states.pt") for path in folder):
        problems.append(f"{tag}/ has no model states")
    for kind in ("optim", "model"):
        matches = (_DEEPSPEED_SHARD_RE.search(path) for path in folder)
        ranks = {int(match.group(1)) for match in matches if match and match.group(2) == kind}
        expected = max(replicas or 0, max(ranks) + 1) if ranks else 0
        problems += (
            f"{tag}/: {problem}" for problem in _absent(ranks, expected, f"the {kind} shard of rank {{}} is missing")
        )
    return problems


def _read_tag(latest: Path) -> str:
    """The directory that DeepSpeed's ``latest`` names. What is too long for a name is cut: nothing has that name."""
    with open(latest, "rb") as stream:
        return stream.read(_MAX_TAG_BYTES).decode("utf-8").strip()


def _missing_listed_files(checkpoint: Path, files: dict[str, FileStat]) -> list[str]:
    """What the index of a sharded model or torch.distributed.checkpoint's metadata list, and is not there."""
    problems = []
    for path in files:
        name = PurePosixPath(path).name
        if name.endswith(".index.json"):
            listed = _shards_in_index(checkpoint / path)
        elif name == ".metadata":
            listed = _strings_in_pickle(checkpoint / path, suffix=".distcp")
        else:
            continue
        shards = sorted((PurePosixPath(path).parent / shard).as_posix() for shard in listed)
        problems += [f"{shard} is missing (listed in {path})" for shard in shards if shard not in files]
    indexes = {(PurePosixPath(path).parent / ".metadata").as_posix() for path in files if path.endswith(".distcp")}
    return problems + [f"{index} is missing" for index in sorted(indexes) if index not in files]


def saved_world_size(checkpoint: Path, files: dict[str, FileStat]) -> int | None:
    """The number of ranks that saved a checkpoint without a manifest; None where nothing tells.

    DeepSpeed records how many replicas there were and how many ranks each had. Else the RNG states are counted.
    """
    replicas = _recorded_size(checkpoint, files, key="dp_world_size")
    if replicas is not None:
        return replicas * (_recorded_size(checkpoint, files, key="mp_world_size") or 1)
    ranks = rng_ranks(files)
    if not ranks:
        return 1 if "rng_state.pth" in files else None
    return max(ranks) + 1


def _recorded_size(checkpoint: Path, files: dict[str, FileStat], *, key: str) -> int | None:
    """What DeepSpeed's model states say under ``key``, in the first of them that can be read."""
    states = (path for path in files if path.endswith("model_states.pt"))
    sizes = (_number_in_torch_file(checkpoint / path, key=key) for path in states)
    return next((size for size in sizes if size is not None), None)


# --- single files; a damaged one can make its parser raise anything, so whatever it raises is the finding ---


def structure_problem(path: Path, *, thorough: bool) -> str | None:
    """What is wrong with a file, judged by its own format; None where nothing is, or the format is not known.

    Args:
        path: the file.
        thorough: also compare the checksums of every record in a torch (zip) file, which reads all of it.
    """
    try:
        if not path.is_file():
            return "is no regular file"
        if path.name.endswith(".safetensors"):
            _tensor_names(path)
        elif path.name.endswith(".json"):
            return _json_problem(path)
        elif path.name.endswith((".pt", ".pth", ".bin", ".distcp")):
            return _torch_file_problem(path, thorough=thorough)
        elif path.name == "latest" and not _read_tag(path):
            return "is empty"
        elif path.name == ".metadata":
            for _ in _pickle_operations(path):
                pass
    except Exception as error:
        return f"is damaged or truncated ({type(error).__name__}: {str(error)[:_MAX_ERROR_TEXT]})"
    return None


def _json_problem(path: Path) -> str | None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if path.name == TRAINER_STATE_NAME and not (type(content) is dict and type(content.get("global_step")) is int):
        return "does not say at which step it was saved"
    return None


def _tensor_names(path: Path) -> list[str]:
    """The tensors in a safetensors file. Opening it compares header and size; nothing else is read."""
    try:
        with safe_open(path, framework="pt") as weights:
            return list(weights.keys())
    except SafetensorError as error:
        raise SafetensorError(f"{path.name}: {error}") from error


def _torch_file_problem(path: Path, *, thorough: bool) -> str | None:
    with open(path, "rb") as stream:
        magic = stream.read(len(_ZIP_MAGIC))
    if magic.startswith(_PICKLE_MAGIC):
        return None  # torch's format before 1.6: there is nothing to compare it with
    if magic != _ZIP_MAGIC:
        return "is no torch file" if magic else "is empty"
    with _torch_zip(path) as archive:
        damaged = archive.testzip() if thorough else None
    return None if damaged is None else f"is damaged: the checksum of {damaged} differs"


@contextlib.contextmanager
def _torch_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """The records of a torch file. They are never compressed, so together they cannot be larger than the file.

    One that claims more could make its reader allocate, or read, without end.
    """
    with zipfile.ZipFile(path) as archive:
        claimed = sum(max(record.file_size, record.compress_size) for record in archive.infolist())
        if claimed > path.stat().st_size:
            raise zipfile.BadZipFile(f"its records claim {claimed} bytes")
        yield archive


def _pickle_operations(path: Path) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """The operations of a pickle. Read from memory, where a length in it can ask for no more than there is."""
    return pickletools.genops(io.BytesIO(path.read_bytes()))


def _shards_in_index(path: Path) -> set[str]:
    try:
        return {str(shard) for shard in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    except Exception:
        return {f"(the files in {path.name}, which is damaged)"}


def _strings_in_pickle(path: Path, *, suffix: str) -> set[str]:
    found: set[str] = set()
    try:
        for _, argument, _ in _pickle_operations(path):
            if isinstance(argument, str) and argument.endswith(suffix):
                found.add(argument)
    except Exception:
        # structure_problem reports the damaged file itself.
        return found
    return found


def _number_in_torch_file(path: Path, *, key: str) -> int | None:
    """The integer that follows the string ``key`` in a torch file's pickle, read without unpickling."""
    try:
        with _torch_zip(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                return _number_after(stream, key)
    except Exception:
        return None


def _number_after(stream: IO[bytes], key: str) -> int | None:
    seen_key = False
    for opcode, argument, _ in pickletools.genops(stream):
        if argument == key:
            seen_key = True
        elif seen_key and isinstance(argument, int) and "PUT" not in opcode.name:
            return argument if 0 < argument <= _MAX_RANKS else None
    return None
