"""errors: one small hierarchy, and failures in a form that every rank can receive."""

from __future__ import annotations

import errno
import inspect
import pickle
from pathlib import Path

import pytest

from safe_trainer import errors
from safe_trainer.errors import CheckpointError, RankFailure

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", ALL)
def test_one_except_clause_catches_them_all(kind: type[Exception]) -> None:
    assert issubclass(kind, CheckpointError)
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_every_one_can_be_made_from_a_text_and_the_ranks_failures(kind: type[CheckpointError]) -> None:
    failure = RankFailure(1, "node0", "write", "OSError", "no space")
    error = kind("what happened", [failure])
    assert str(error) == "what happened"
    assert error.failures == (failure,)
    assert kind("what happened").failures == ()


def test_a_failure_tells_rank_host_step_kind_and_text() -> None:
    failure = RankFailure.from_exception(KeyError("x"), rank=3, host="node1", phase="write")
    assert str(failure) == "rank 3 on node1, write: KeyError: 'x'"


def test_a_failure_of_the_system_has_its_number_and_path() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/disk/checkpoint-5/model")
    failure = RankFailure.from_exception(error, rank=0, host="node0", phase="gather")
    assert (failure.errno, failure.path) == (errno.ENOSPC, "/disk/checkpoint-5/model")
    assert "ENOSPC" in str(failure)
    assert "/disk/checkpoint-5/model" in str(failure)


def test_an_exception_without_text_is_told_by_its_name() -> None:
    failure = RankFailure.from_exception(ValueError(), rank=0, host="node0", phase="write")
    assert str(failure) == "rank 0 on node0, write: ValueError: ValueError()"


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "x", b"/bytes"),
        OSError("no number"),
        OSError(99999, "odd"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
    ],
)
def test_whatever_was_raised_can_be_described_and_sent(error: Exception) -> None:
    failure = RankFailure.from_exception(error, rank=0, host="node0", phase="write")
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert str(failure)


class GatheredError(BaseException):
    """As torch.distributed.checkpoint raises it on every rank, whichever has failed."""

    def __init__(self, failures: dict[int, tuple[BaseException, None]]) -> None:
        super().__init__("a long traceback")
        self.failures = failures


def test_of_an_error_that_was_gathered_from_all_ranks_each_tells_its_own_part() -> None:
    gathered = GatheredError({3: (OSError(errno.ENOSPC, "No space left on device", "/x"), None)})
    own = RankFailure.from_exception(gathered, rank=3, host="node1", phase="write")
    other = RankFailure.from_exception(gathered, rank=0, host="node0", phase="write")
    assert (own.kind, own.errno, own.is_consequence) == ("OSError", errno.ENOSPC, False)
    assert other.is_consequence
    assert str(other) == "rank 0 on node0, write: GatheredError: failed on [3]"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (RuntimeError("basic_ios::clear: iostream error"), None),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
    ],
)
def test_what_libraries_say_of_a_full_disk_gets_a_path_and_free_bytes(
    tmp_path: Path, error: Exception, number: int | None
) -> None:
    failure = RankFailure.from_exception(error, rank=0, host="n", phase="write", place=tmp_path / "gone" / "deeper")
    assert (failure.errno, failure.path) == (number, str(tmp_path / "gone" / "deeper"))
    assert failure.free_bytes is not None
    assert str(failure).endswith(f"[{tmp_path}/gone/deeper] ({failure.free_bytes} bytes free there)")


def test_an_attribute_that_only_looks_like_an_error_number_is_left_out() -> None:
    error = ValueError("x")
    error.errno = "not a number"  # type: ignore[attr-defined]
    assert RankFailure.from_exception(error, rank=0, host="node0", phase="write").errno is None
