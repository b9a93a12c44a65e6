"""The table of engines and disks (tests/distributed/test_engines.py) on ext4, xfs and btrfs instead of memory."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.cluster import REPOSITORY
from tests.filesystems import images

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.file_systems

TABLE = "tests/distributed/test_engines.py"
TIMEOUT_S = 3600.0


@pytest.mark.parametrize("kind", images.KINDS)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(["--all", "-k", "test_committed"], id="every row's saves"),
        pytest.param(["-k", "test_resumed"], id="a part of the rows resumed"),
    ],
)
def test_table_on(kind: images.Kind, rows: list[str]) -> None:
    if (reason := images.why_not(kind)) is not None:
        pytest.skip(reason)
    table = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TABLE, *rows]
    done = subprocess.run(
        [sys.executable, "-m", "tests.filesystems.on_image", kind, *table],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logger.info("%s: %s; %s", kind, done.stdout.strip().splitlines()[-1], done.stderr.strip().splitlines()[-1])
