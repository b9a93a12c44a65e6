"""The house: imports point downward only, and nothing below trainer.py knows transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import safe_trainer

PACKAGE = Path(safe_trainer.__file__).parent
# Each module may import only from those before it. A new module finds its place here, and in docs/design.md.
ORDER = (
    "disk",
    "process",
    "errors",
    "digest",
    "layout",
    "options",
    "watch",
    "channel",
    "agreement",
    "preemption",
    "manifest",
    "topology",
    "integrity",
    "lock",
    "pieces",
    "commit",
    "transfer",
    "rotation",
    "reuse",
    "staging",
    "run",
    "save",
    "background",
    "resume",
    "trainer",
)
ABOVE_TRANSFORMERS = {"trainer", "__init__"}
FOREIGN = ("transformers", "accelerate", "deepspeed", "peft", "trl")

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imported_by(module: str) -> set[str]:
    """Every module that ``module`` imports anywhere, by its full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            if node.module == "safe_trainer":
                found.update(f"safe_trainer.{alias.name}" for alias in node.names)
    return found


def test_every_module_has_its_place() -> None:
    assert set(MODULES) == {"__init__", *ORDER}


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_downward(module: str) -> None:
    below = {f"safe_trainer.{name}" for name in ORDER[: ORDER.index(module)]}
    own = {name for name in imported_by(module) if name.partition(".")[0] == "safe_trainer"}
    assert own <= below


@pytest.mark.parametrize("module", sorted(set(MODULES) - ABOVE_TRANSFORMERS))
def test_nothing_below_the_trainer_names_a_training_library(module: str) -> None:
    assert not {name for name in imported_by(module) if name.partition(".")[0] in FOREIGN}


def test_all_but_the_trainer_works_where_transformers_is_not_installed() -> None:
    script = f"""
import importlib, sys
for name in {FOREIGN!r}:
    sys.modules[name] = None  # as if it were not installed
for name in {ORDER[:-1]!r}:
    importlib.import_module("safe_trainer." + name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=PACKAGE.parent)


def test_the_public_names_are_all_there_and_no_others() -> None:
    assert all(hasattr(safe_trainer, name) for name in safe_trainer.__all__)
    assert not hasattr(safe_trainer, "something_else")
