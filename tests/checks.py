"""What must hold of a checkpoint or a run directory, asked from outside, without the package's own code.

The digests and the layout are computed here a second time on purpose: a fault in the package must not hide itself.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

MANIFEST = "checkpoint_manifest.json"
AREA = "_safe_trainer"
STAYS_IN_AREA = {"lock", "generation.json"}


def files_below(root: Path) -> set[str]:
    """Relative paths of all files below ``root``, dot files too."""
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def checkpoints(run_directory: Path) -> list[int]:
    """The steps of the directories that are named as checkpoints."""
    return sorted(
        int(match.group(1))
        for entry in run_directory.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)", entry.name))
    )


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The parsed manifest."""
    document: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    return document


def assert_matches_manifest(checkpoint: Path, *, scope: str = "full") -> None:
    """Every file that the manifest lists is there with its size and digest; in a full one, no other file is."""
    manifest = manifest_of(checkpoint)
    assert manifest["scope"] == scope
    assert checkpoint.name == f"checkpoint-{manifest['step']}"
    listed = {entry["path"]: entry for entry in manifest["files"]}
    if scope == "full":
        assert files_below(checkpoint) - {MANIFEST} == set(listed)
    for path, entry in listed.items():
        content = (checkpoint / path).read_bytes()
        assert len(content) == entry["size"], path
        assert xxhash.xxh3_128(content).hexdigest() == entry["digest"], path


def assert_only_checkpoints(run_directory: Path) -> None:
    """Nothing but ``_safe_trainer/`` stands beside the checkpoints, and nothing unfinished is in it."""
    others = {entry.name for entry in run_directory.iterdir() if not re.fullmatch(r"checkpoint-\d+", entry.name)}
    assert others <= {AREA}
    if AREA in others:
        assert files_below(run_directory / AREA) <= STAYS_IN_AREA
        assert {entry.name for entry in (run_directory / AREA).iterdir()} <= STAYS_IN_AREA


def assert_writing_ranks(checkpoint: Path) -> None:
    """The writing rank in the manifest is the one in the file's name, and rank 0 for what has none."""
    for entry in manifest_of(checkpoint)["files"]:
        match = re.search(r"(?:rng_state_|zero_pp_rank_|/__)(\d+)", entry["path"])
        assert entry["rank"] == (int(match.group(1)) if match else 0), entry["path"]


def assert_same_content(ours: Path, stock: Path, *, paths: Iterable[str]) -> None:
    """Two checkpoints hold the same tensors and values, file by file; ``ours`` may have its manifest besides."""
    for path in sorted(paths):
        assert _equal(_content(ours / path), _content(stock / path)), f"{path} differs from stock's"


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return _without_paths(json.loads(path.read_text()))
    if path.name == "training_args.bin":
        # What differs are the paths and the devices; which fields there are must be the same.
        return sorted(vars(torch.load(path, weights_only=False)))
    if path.suffix in (".pt", ".pth", ".bin"):
        content = torch.load(path, weights_only=False, map_location="cpu")
        # DeepSpeed's configuration says whether disks are node-local; two runs may differ in just that.
        return _without(content, "ds_config") if path.name.endswith("_states.pt") else content
    if path.name == ".metadata":
        with path.open("rb") as stream:
            return _metadata(pickle.load(stream))
    return path.read_bytes()


def _without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


def _metadata(metadata: Any) -> Any:
    """torch.distributed.checkpoint's index without the random identifier of each save."""
    return {"state": str(metadata.state_dict_metadata), "storage": str(metadata.storage_data)}


def _without_paths(document: Any) -> Any:
    """A JSON document in which absolute paths are reduced to their last part: two runs, two directories."""
    if isinstance(document, dict):
        return {key: _without_paths(value) for key, value in document.items() if not key.endswith("_runtime")}
    if isinstance(document, list):
        return [_without_paths(value) for value in document]
    if isinstance(document, str) and document.startswith("/"):
        return Path(document).name
    return document


def _equal(ours: Any, stock: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return isinstance(stock, torch.Tensor) and ours.dtype == stock.dtype and torch.equal(ours, stock)
    if isinstance(ours, Mapping):
        return (
            isinstance(stock, Mapping)
            and list(ours) == list(stock)
            and all(_equal(ours[key], stock[key]) for key in ours)
        )
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(stock) and all(_equal(a, b) for a, b in zip(ours, stock, strict=True))
    if hasattr(ours, "__array__"):
        return bool((ours == stock).all())
    if type(ours).__module__.startswith(("deepspeed", "transformers")):
        return _equal(vars(ours), vars(stock))
    return bool(ours == stock)
