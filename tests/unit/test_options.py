"""options: what a user can choose, in code, on the command line and from the environment."""

from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from safe_trainer.errors import CheckpointError, OptionError
from safe_trainer.options import ENVIRONMENT_PREFIX, CheckpointOptions

FIELDS = dataclasses.fields(CheckpointOptions)
CHOICES = {
    "storage": ("auto", "shared", "local"),
    "local_copies": ("keep", "full", "drop"),
    "verify": ("digest", "size", "off"),
    "on_error": ("raise", "continue"),
}
SWITCHES = ("background", "save_on_preemption")
SECONDS = ("timeout_s", "lock_timeout_s", "visibility_timeout_s")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in FIELDS:
        monkeypatch.delenv(variable(option.name), raising=False)


def variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def test_these_are_all_fields_and_their_defaults() -> None:
    assert dataclasses.asdict(CheckpointOptions()) == {
        "storage": "auto",
        "local_copies": "keep",
        "verify": "digest",
        "background": False,
        "staging": "disk",
        "on_error": "raise",
        "save_on_preemption": True,
        "preemption_signals": "SIGTERM",
        "timeout_s": 600.0,
        "lock_timeout_s": 120.0,
        "visibility_timeout_s": 60.0,
    }


@pytest.mark.parametrize("option", FIELDS, ids=lambda option: str(option.name))
def test_every_field_has_help_that_names_its_variable_and_default(option: dataclasses.Field[Any]) -> None:
    text = option.metadata["help"]
    assert len(text) > 60
    assert variable(option.name) in text
    assert repr(getattr(CheckpointOptions(), option.name)) in text


@pytest.mark.parametrize("name", CHOICES)
def test_the_help_explains_every_choice(name: str) -> None:
    text = CheckpointOptions.__dataclass_fields__[name].metadata["help"]
    assert all(f"'{choice}'" in text for choice in CHOICES[name])


# --- right and wrong values ---


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHOICES.items() for value in values])
def test_every_choice_is_accepted(name: str, value: str) -> None:
    assert getattr(CheckpointOptions(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "Auto", "AUTO ", "everything", None, 1, True, ["auto"]])
@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_choice_is_an_error_that_lists_the_right_ones(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        CheckpointOptions(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{name}={value!r}")
    assert all(f"'{choice}'" in str(caught.value) for choice in CHOICES[name])


@pytest.mark.parametrize("value", [1, 0.5, 1e6])
@pytest.mark.parametrize("name", SECONDS)
def test_seconds_are_any_positive_number(name: str, value: float) -> None:
    assert getattr(CheckpointOptions(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, -0.5, math.inf, math.nan, "60", None, True])
@pytest.mark.parametrize("name", SECONDS)
def test_wrong_seconds_are_an_error_that_says_what_to_give(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name}=.*number of seconds greater than 0"):
        CheckpointOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "signals"),
    [
        ("SIGTERM", (signal.SIGTERM,)),
        ("sigterm, usr1 ,SIGTERM", (signal.SIGTERM, signal.SIGUSR1)),
        ("", ()),
    ],
)
def test_signals_are_given_by_name(names: str, signals: tuple[signal.Signals, ...]) -> None:
    assert CheckpointOptions(preemption_signals=names).signals() == signals
    assert CheckpointOptions(preemption_signals=names, save_on_preemption=False).signals() == ()


@pytest.mark.parametrize("names", ["SIGKILL", "STOP", "TERMINATE", "SIGTERM;SIGUSR1", 15, None])
def test_wrong_signals_are_an_error_that_says_what_to_give(names: object) -> None:
    with pytest.raises(OptionError, match=r"preemption_signals=.*names of signals"):
        CheckpointOptions(preemption_signals=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1, "true", "no"])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(OptionError, match=r"save_on_preemption=.*True or False"):
        CheckpointOptions(save_on_preemption=value)  # type: ignore[arg-type]


def test_an_option_error_is_a_value_error_and_a_checkpoint_error() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, CheckpointError)


# --- the environment ---


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("storage", "local", "local"),
        ("local_copies", "full", "full"),
        ("verify", "off", "off"),
        ("on_error", "continue", "continue"),
        ("save_on_preemption", "false", False),
        ("save_on_preemption", "1", True),
        ("preemption_signals", "SIGUSR2", "SIGUSR2"),
        ("timeout_s", "12.5", 12.5),
        ("lock_timeout_s", "3", 3.0),
        ("visibility_timeout_s", "1e2", 100.0),
    ],
)
def test_a_variable_sets_the_default(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(variable(name), text)
    assert getattr(CheckpointOptions(), name) == value


def test_every_field_has_a_variable() -> None:
    assert {option.name for option in FIELDS} == {*CHOICES, *SECONDS, *SWITCHES, "staging", "preemption_signals"}


def test_a_keyword_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_TRAINER_STORAGE", "local")
    assert CheckpointOptions(storage="shared").storage == "shared"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("storage", "cloud"),
        ("storage", ""),
        ("save_on_preemption", "maybe"),
        ("preemption_signals", "SIGKILL"),
        ("timeout_s", "soon"),
        ("timeout_s", ""),
        ("timeout_s", "nan"),
        ("lock_timeout_s", "0"),
        ("visibility_timeout_s", "-5"),
    ],
)
def test_a_wrong_value_from_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(variable(name), text)
    with pytest.raises(OptionError) as caught:
        CheckpointOptions()
    assert variable(name) in str(caught.value)


def test_a_wrong_keyword_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_TRAINER_STORAGE", "local")
    with pytest.raises(OptionError) as caught:
        CheckpointOptions(storage="cloud")  # type: ignore[arg-type]
    assert "SAFE_TRAINER_STORAGE" not in str(caught.value)


# --- the command line, beside TrainingArguments ---


def parse(tmp_path: Path, *arguments: str) -> tuple[TrainingArguments, CheckpointOptions]:
    parser = HfArgumentParser((TrainingArguments, CheckpointOptions))
    parsed = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *arguments])
    return parsed[0], parsed[1]


def test_it_is_parsed_together_with_training_arguments(tmp_path: Path) -> None:
    arguments, options = parse(
        tmp_path, "--storage", "local", "--local_copies", "full", "--verify", "size", "--timeout_s", "5"
    )
    assert arguments.output_dir == str(tmp_path)
    assert options == CheckpointOptions(storage="local", local_copies="full", verify="size", timeout_s=5.0)


def test_on_the_command_line_too_a_variable_sets_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_TRAINER_VERIFY", "off")
    _, options = parse(tmp_path)
    assert options == CheckpointOptions(verify="off")


@pytest.mark.parametrize(
    ("arguments", "saves"),
    [([], True), (["--save_on_preemption", "false"], False), (["--save_on_preemption", "true"], True)],
)
def test_a_switch_on_the_command_line(tmp_path: Path, arguments: list[str], saves: bool) -> None:
    assert parse(tmp_path, *arguments)[1].save_on_preemption is saves


@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_choice_on_the_command_line_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(tmp_path, f"--{name}", "cloud")
    assert "invalid choice" in capsys.readouterr().err


def test_the_help_of_the_command_line_can_be_printed_and_has_every_field() -> None:
    text = HfArgumentParser(CheckpointOptions).format_help()  # type: ignore[arg-type]
    assert all(f"--{option.name}" in text for option in FIELDS)
