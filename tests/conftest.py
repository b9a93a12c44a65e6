"""Fixtures of all tests: the clusters, each started once by the first test that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the whole tables, not only a part of each")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole_table: a row that only `make test-all` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("whole_table")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def one_process() -> Iterator[Cluster]:
    """A single process, torch.distributed not initialised."""
    with Cluster(nodes=1, ranks_per_node=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Cluster]:
    """Two nodes of two ranks."""
    with Cluster(nodes=2, ranks_per_node=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[Cluster]:
    """Three nodes of one rank."""
    with Cluster(nodes=3, ranks_per_node=1) as cluster:
        yield cluster


class Clusters:
    """Which cluster a kind of disks is tried on."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def of(self, *, engine: str, layout: str) -> Cluster:
        """The cluster for one row of a table; started when it is first asked for."""
        name = "one_process" if engine == "single" else "three_nodes" if layout == "pair" else "two_nodes"
        cluster: Cluster = self._request.getfixturevalue(name)
        return cluster


@pytest.fixture
def clusters(request: pytest.FixtureRequest) -> Clusters:
    return Clusters(request)
