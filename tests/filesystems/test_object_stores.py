"""Object stores behind a mount: what cannot work is refused before training starts, with the reason."""

from __future__ import annotations

import pytest

from tests.filesystems import scenarios
from tests.filesystems.conftest import open_place

pytestmark = pytest.mark.file_systems


def test_caches_of_minutes_are_refused_at_the_start() -> None:
    """rclone keeps listings for five minutes unless told otherwise: each host would take the bucket for its own."""
    with open_place("rclone") as place:
        results = place.job.run(scenarios.start_only, root=f"{place.path}/run", options={})

    assert {result["kind"] for result in results} == {"StorageError"}
    assert len({result["error"] for result in results}) == 1
    assert "--dir-cache-time" in results[0]["error"]
