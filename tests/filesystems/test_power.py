"""A host loses its power in the middle of a save, and with it what its kernel or file system client had not sent off.

What was said to be committed must be on the server. The other host resumes from it, alone.
"""

from __future__ import annotations

import logging
import random

import pytest

from tests.filesystems import scenarios
from tests.filesystems.conftest import KINDS, open_place
from tests.filesystems.job import Job

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.file_systems

# The other variants of NFS differ in what clients cache of names, not in what they send off.
PLACES = ("NFS vers=4.2", "NFS vers=3", *(name for name in KINDS if not name.startswith("NFS") and name != "rclone"))
FIRST_SAVES_TIMEOUT_S = 180.0


@pytest.mark.parametrize("victim", [0, 1], ids=["home's host", "the other host"])
@pytest.mark.parametrize("name", PLACES)
def test_what_was_committed_is_on_the_server(name: str, victim: int) -> None:
    moment = random.Random(f"{name} {victim}")
    with open_place(name) as place:
        root = f"{place.path}/run"
        calls = place.job.start(scenarios.save_for_ever, root=root)

        def have_saved() -> bool:
            return sum("saved" in told for told in calls.answers[0].told) >= 3 or calls.answers[0].done

        assert calls.wait(have_saved, timeout_s=FIRST_SAVES_TIMEOUT_S)
        problems = [answer.problem for answer in calls.answers if answer.problem is not None]
        assert not problems, "\n".join(problems)
        calls.wait(lambda: False, timeout_s=moment.uniform(0.0, 1.0))
        place.cut_power(victim)
        calls.kill()
        told = [message["saved"] for answer in calls.answers for message in answer.told if "saved" in message]

        survivor = place.hosts[1 - victim]
        ranks = len(place.hosts) * place.job.ranks_per_host
        with Job([survivor], place.logs, ranks_per_host=place.job.ranks_per_host) as alone:
            resumed = alone.run(scenarios.resume, root=root, saved_by=ranks)

    logger.info("%s: saved %s, resumed from %s: %s", name, max(told), resumed[0]["step"], resumed[0]["warnings"])
    assert len({(result["step"], result["number"]) for result in resumed}) == 1
    assert resumed[0]["step"] >= max(told)
