"""The benchmarks' arithmetic, their table, and what becomes of what cannot be measured here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import package
from benchmarks.measure import Ratio, Series, Target, Unavailable, alternate, format_size, parse_size
from benchmarks.peers import copying, dlrover, rsync
from benchmarks.report import Report, Row
from benchmarks.runner import Bench, run
from benchmarks.suites import SUITES, Suite


def series(*values: float, name: str = "x") -> Series:
    return Series(name, "s", values)


class TestArithmetic:
    def test_a_ratio_is_of_medians_and_its_spread_of_repeats(self) -> None:
        ratio = Ratio.of(series(1.0, 2.0, 9.0), series(1.0, 4.0, 3.0))

        assert ratio == Ratio(value=2.0 / 3.0, low=0.5, high=3.0)

    def test_a_throughput_is_that_of_each_sample(self) -> None:
        assert series(0.5, 2.0).per_second(100_000_000).values == (200.0, 50.0)

    @pytest.mark.parametrize(
        ("relation", "figure", "reached"),
        [("<=", 1.0, True), ("<=", 1.1, False), (">=", 1.0, True), (">=", 0.9, False)],
    )
    def test_a_target_is_reached_at_its_bound(self, relation: str, figure: float, reached: bool) -> None:
        assert Target(relation, 1.0).reached(figure) is reached  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("text", "size"),
        [("64MB", 64_000_000), ("1GB", 10**9), ("16MiB", 16 << 20), ("1.5 GB", 1_500_000_000), ("7", 7)],
    )
    def test_sizes_are_read(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "MB", "64XB", "0", "-1GB", "1.2.3MB"])
    def test_what_is_no_size_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"size|float"):
            parse_size(text)

    def test_sizes_are_written_as_they_are_read(self) -> None:
        assert [format_size(parse_size(text)) for text in ("64 MB", "1 GB", "4 GB", "8 KB", "12 B")] == [
            "64 MB",
            "1 GB",
            "4 GB",
            "8 KB",
            "12 B",
        ]


class TestAlternation:
    def test_arms_take_turns(self) -> None:
        order: list[str] = []

        def arm(name: str) -> Callable[[], int]:
            return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

        samples = alternate({name: arm(name) for name in "abcd"}, repeats=20, warmups=1)

        turns = ["".join(order[start : start + 4]) for start in range(0, len(order), 4)]
        assert [sorted(turn) for turn in turns] == [list("abcd")] * 21
        assert len(set(turns)) > 5  # each arm comes after each other one
        assert len(samples.of("a")) == 20
        assert samples.of("a")[0] == order.index("a", 4) + 1  # the first turn was to warm up
        assert samples.series("b", float).values[0] == order.index("b", 4) + 1

    def test_an_arm_that_is_missing_does_not_stop_the_others_and_is_not_asked_again(self) -> None:
        asked: list[int] = []

        def missing() -> int:
            asked.append(1)
            raise Unavailable("no such tool")

        samples = alternate({"a": missing, "b": lambda: 7}, repeats=3)

        assert samples.of("b") == [7, 7, 7]
        assert len(asked) == 1
        with pytest.raises(Unavailable, match="no such tool"):
            samples.series("a", float)


class TestReport:
    def report(self) -> Report:
        report = Report({"processor": "fast", "cores": 2, "file systems": ["ext4"]}, {"repeats": 3})
        ours, theirs = series(1.0, 1.2, 1.1, name="ours"), series(1.0, 1.0, 1.0, name="stock")
        report.rows = [
            Row.ratio("stall", "1 GB", ours, theirs, target=Target("<=", 1.05), note="two nodes"),
            Row.ratio("stall", "2 GB", theirs, ours, target=Target("<=", 1.05)),
            Row.absent("stall", "1 GB, flash", "dlrover is not\n installed", against="DLRover"),
            Row.value("memory", "4 GB", Series("over stock", "bytes", (1 << 20,)), target=Target("<=", 64 << 20)),
        ]
        return report

    def test_the_table_says_what_was_missed_and_what_is_missing(self) -> None:
        table = self.report().markdown()

        assert "| stall | 1 GB | 1.1 s (1 s to 1.2 s) | stock | 1 s (1 s to 1 s) | **1.1** (1 to 1.2) |" in table
        assert "| at most 1.05 | no |" in table
        assert "| at most 1.05 | yes |" in table
        assert "| DLRover | - | not measured: dlrover is not installed |" in table
        assert (
            "| memory | 4 GB | 1.0 MiB (1.0 MiB to 1.0 MiB) | - | - | **1.0 MiB** | at most 64.0 MiB | yes |" in table
        )
        assert "- stall, 1 GB: two nodes" in table
        assert "processor: fast" in table

    def test_every_sample_is_kept(self, tmp_path: Path) -> None:
        self.report().write(tmp_path)

        rows = json.loads((tmp_path / "results.json").read_text())["rows"]
        assert rows[0]["measured"]["values"] == [1.0, 1.2, 1.1]
        assert rows[0]["peer"]["values"] == [1.0, 1.0, 1.0]
        assert (rows[0]["figure"], rows[0]["reached"], rows[1]["reached"]) == (pytest.approx(1.1), False, True)
        assert (rows[2]["missing"], rows[2]["reached"]) == ("dlrover is not installed", None)


class TestRunner:
    def bench(self, tmp_path: Path) -> Bench:
        options = program.parser().parse_args(["--directory", str(tmp_path)])
        return Bench(program.settings_of(options), Report({}, {}))

    def test_a_suite_that_breaks_off_leaves_a_row_and_the_next_one_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(bench: Bench) -> None:
            raise OSError("no space left\nmore of it")

        def whole(bench: Bench) -> None:
            bench.add(Row.value("whole", "a", series(1.0)))

        monkeypatch.setattr("benchmarks.suites.SUITES", {"broken": Suite("", broken), "whole": Suite("", whole)})
        bench = self.bench(tmp_path)

        run(bench, ["broken", "whole"])

        assert [(row.suite, row.missing) for row in bench.report.rows] == [
            ("broken", "failed: OSError: no space left"),
            ("whole", None),
        ]

    def test_what_simulates_nodes_does_not_run_on_a_launchers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        bench = self.bench(tmp_path)

        run(bench, ["scale"])

        assert "simulates nodes" in str(bench.report.rows[0].missing)

    def test_a_row_without_its_peer_says_why(self, tmp_path: Path) -> None:
        bench = self.bench(tmp_path)

        with bench.row_of("gather", "1 GB", against="rsync daemon"):
            raise Unavailable("rsync is not installed")

        assert bench.report.rows == [Row.absent("gather", "1 GB", "rsync is not installed", against="rsync daemon")]


class TestPeers:
    def test_a_tool_that_is_not_installed_is_said_so(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))

        assert rsync.problem() == "rsync is not installed"
        with pytest.raises(Unavailable, match="rsync is not installed"), rsync.serve(tmp_path):
            pass

    def test_a_package_that_is_not_installed_is_said_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

        with pytest.raises(Unavailable, match="dlrover is not installed"):
            dlrover.trainer_class()

    def test_a_mode_that_this_version_lacks_is_said_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dataclasses.fields", lambda options: ())

        assert package.mode_problem("foreground") is None
        assert package.mode_problem("background") == "this version has no background saves"
        with pytest.raises(Unavailable, match="no background saves"):
            package.options("memory")

    def test_a_copy_into_warm_memory_is_of_the_tensors_as_they_are_now(self) -> None:
        torch = pytest.importorskip("torch")
        tensors = [torch.zeros(3), torch.ones(2)]
        copying.warm_up(tensors)

        tensors[0] += 5
        copying.copy_into_warm(tensors)

        assert [buffer.tolist() for buffer in copying._buffers] == [[5.0, 5.0, 5.0], [1.0, 1.0]]
        copying.forget()
        assert copying._buffers == []


class TestCommandLine:
    def test_defaults(self) -> None:
        settings = program.settings_of(program.parser().parse_args([]))

        assert settings.sizes == (64_000_000, 10**9, 4 * 10**9)
        assert settings.repeats == 5
        assert settings.directory == settings.other_disks

    def test_suites_and_sizes(self, tmp_path: Path) -> None:
        options = program.parser().parse_args(
            ["--suite", "wire", "--suite", "gather", "--size", "1GB,8MB", "--directory", str(tmp_path), "--nodes", "3"]
        )

        assert options.suite == ["wire", "gather"]
        assert program.settings_of(options).sizes == (8_000_000, 10**9)
        assert program.settings_of(options).nodes == 3

    @pytest.mark.parametrize(
        "arguments",
        [["--suite", "nothing"], ["--size", "big"], ["--repeats", "0"], ["--directory", "/nowhere/at/all"]],
    )
    def test_what_makes_no_sense_is_refused(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            program.parser().parse_args(arguments)

        assert arguments[1] in capsys.readouterr().err

    def test_results_name_no_path(self, tmp_path: Path) -> None:
        settings = program.settings_of(program.parser().parse_args(["--directory", str(tmp_path)]))

        assert str(tmp_path) not in json.dumps(program.described(settings, list(SUITES)))
