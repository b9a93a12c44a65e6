"""Saving, replacing, resuming and being killed on real shared file systems, by ranks on two hosts, without a model.

The hosts have networks of their own, so ranks talk over one, and mounts of their own, so what one has cached the other
does not know.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Iterator

import pytest

from tests.filesystems import scenarios
from tests.filesystems.conftest import KINDS, Place, open_place
from tests.filesystems.job import Calls, Job

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.file_systems

PLACES = [name for name in KINDS if name != "rclone"]  # see test_object_stores.py
LIVES = 6
FIRST_SAVES_TIMEOUT_S = 120.0


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with open_place(request.param) as place:
        yield place


def test_saves_rotates_and_replaces(place: Place) -> None:
    results = place.job.run(scenarios.save_rotate_replace, root=f"{place.path}/run")

    everyone = list(range(len(results)))
    assert [result["domains"] for result in results] == [[everyone]] * len(results)
    seen_after_s = max(result["seen_after_s"] for result in results)
    logger.info("%s: %s s per save, seen after %s s", place.name, results[0]["seconds"], seen_after_s)
    logger.info("%s: warnings: %s", place.name, results[0]["warnings"])
    resumed = place.job.run(scenarios.resume, root=f"{place.path}/run")
    assert [(result["step"], result["number"]) for result in resumed] == [(30, 4)] * len(results)


def test_resumes_at_once_what_others_have_just_replaced(place: Place) -> None:
    """Between runs too, caches are warm: each start looks at what the one before it has left, and changes it."""
    root = f"{place.path}/again"
    for _ in range(2):
        for _ in range(2):
            place.job.run(scenarios.save_rotate_replace, root=root)
        resumed = place.job.run(scenarios.resume, root=root)
        assert {(result["step"], result["number"]) for result in resumed} == {(30, 4)}


def test_when_a_host_dies_in_a_save_the_newest_complete_one_is_taken(place: Place) -> None:
    root = f"{place.path}/killed"
    moments = random.Random(place.name)
    newest = 0
    resumed = []
    for life in range(LIVES):
        calls = place.job.start(scenarios.save_for_ever, root=root)
        enough = moments.randrange(2, 6)
        assert calls.wait(functools.partial(_have_saved, calls, enough), timeout_s=FIRST_SAVES_TIMEOUT_S)
        calls.wait(lambda: False, timeout_s=moments.uniform(0.0, 1.0))
        told = [answer.told for answer in calls.answers]
        problems = [answer.problem for answer in calls.answers if answer.problem]
        assert not problems, "\n".join(problems)
        calls.kill_host(life % len(place.hosts))
        time.sleep(moments.choice([0.0, 0.5]))
        calls.kill()

        steps = {next(message["resumed"] for message in messages if "resumed" in message) for messages in told}
        assert len(steps) == 1, "ranks resume from different steps"
        resumed.append(steps.pop())
        assert resumed[-1] >= newest, "something that was committed is lost"
        newest = max(message["saved"] for messages in told for message in messages if "saved" in message)

    results = place.job.run(scenarios.resume, root=root)
    assert all(result["step"] >= newest for result in results)
    assert len({(result["step"], result["number"]) for result in results}) == 1
    logger.info("%s: resumed from %s, and at last from %s", place.name, resumed, results[0]["step"])


def _have_saved(calls: Calls, saves: int) -> bool:
    """Whether the first rank has told of so many saves; or something is wrong, so that there is nothing to wait for."""
    saved = sum("saved" in told for told in calls.answers[0].told)
    return saved >= saves or any(answer.done for answer in calls.answers)


def test_the_other_host_resumes_alone(place: Place) -> None:
    """The machine that was home's leader is gone for good."""
    root = f"{place.path}/alone"
    place.job.run(scenarios.save_rotate_replace, root=root)
    with Job(place.hosts[1:], place.logs, ranks_per_host=place.job.ranks_per_host) as alone:
        resumed = alone.run(scenarios.resume, root=root, saved_by=len(place.hosts) * alone.ranks_per_host)
    assert {(result["step"], result["number"]) for result in resumed} == {(30, 4)}
