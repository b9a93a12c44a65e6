"""What ranks tell the demo about a run."""

from __future__ import annotations

from typing import Any, TypedDict

import xxhash


class Observation(TypedDict):
    """What one rank has seen.

    Attributes:
        losses: this rank's loss of each step, unrounded (`float.hex`).
        first_step: how many steps were behind it when training began.
        resumed_from: the checkpoint that it was given to load, or None.
        resumed_files: digest of each file in there.
        trained: digest of each trained parameter at the end.
    """

    losses: dict[str, str]
    first_step: int
    resumed_from: str | None
    resumed_files: dict[str, str]
    trained: dict[str, str]


def tensor_digest(array: Any) -> str:
    """The digest of a numpy array: equal for equal types, shapes and bits."""
    return f"{array.dtype} {list(array.shape)} {xxhash.xxh3_128_hexdigest(array.tobytes())}"
