"""One rank of a training job on several hosts, under torch.distributed.run (`test_trainer.py`).

    python -m torch.distributed.run ... -m tests.filesystems.train RUN_DIRECTORY RESULTS ENGINE...

For each engine it trains without interruption, then with one and a resume, and writes what came out into RESULTS.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import checks
from tests.training import run_training

TRAINER = "safe_trainer:SafeTrainer"
STEPS = 6
SAVE_STEPS = 2
LIMIT = 2
SEEN_TIMEOUT_S = 90.0


def main() -> int:
    """Runs every engine in turn; one process group for all."""
    root, results, *engines = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcome = {engine: row(engine, Path(root, engine)) for engine in engines}
    Path(results, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()
    return 0


def row(engine: str, root: Path) -> dict[str, Any]:
    """One engine: an uninterrupted run, an interrupted one, and its continuation."""
    whole = _train(engine, root / "whole")
    _train(engine, root / "cut", stop_after=4)
    continued = _train(engine, root / "cut", resume=True)
    for name in ("whole", "cut"):
        _check(root / name)
    dist.barrier()
    return {
        "losses": whole["losses"],
        "continued": continued["losses"],
        "first_step": continued["first_step"],
        "same_parameters": whole["parameters_digest"] == continued["parameters_digest"],
        "last_save": whole["inspect"],
    }


def _train(engine: str, directory: Path, **options: Any) -> dict[str, Any]:
    return run_training(
        engine=engine,
        output_dir=str(directory),
        trainer=TRAINER,
        steps=STEPS,
        save_steps=SAVE_STEPS,
        args={"save_total_limit": LIMIT},
        inspect="tests.scenarios:last_save",
        **options,
    )


def _check(directory: Path) -> None:
    """This host, too, sees the last checkpoints whole, if not at once."""
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        try:
            assert checks.checkpoints(directory) == [4, 6]
            for step in (4, 6):
                checks.assert_matches_manifest(directory / f"checkpoint-{step}")
            return
        except (AssertionError, OSError, ValueError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())
