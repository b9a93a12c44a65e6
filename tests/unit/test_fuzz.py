"""What is read from a disk or from other ranks can be anything: any bytes give a CheckpointError or a finding, never
another exception, never a write outside the run directory, never memory without end.

FUZZ_EXAMPLES=5000 looks longer, at random, instead of at the same examples every time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safe_trainer.channel import Channel
from safe_trainer.commit import RunDirectory
from safe_trainer.errors import CheckpointError, UnsafePathError
from safe_trainer.integrity import (
    file_problem,
    inspect_checkpoint,
    saved_world_size,
    structure_problem,
    tensorless_weights,
)
from safe_trainer.layout import (
    MANIFEST_NAME,
    TRAINER_STATE_NAME,
    RunLayout,
    list_files,
    resolve_inside,
)
from safe_trainer.lock import ClaimGuard
from safe_trainer.manifest import FORMAT, FileEntry, Manifest
from safe_trainer.options import CheckpointOptions
from safe_trainer.pieces import finish_pieces
from safe_trainer.resume import resume_latest
from safe_trainer.run import open_run
from safe_trainer.transfer import Shipment, ship
from tests.unit.builders import (
    contents,
    make_checkpoint,
    make_stock_checkpoint,
    manifest_of,
    start_run,
    write_files,
)
from tests.unit.processes import run_in_child

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
DIGEST = "0123456789abcdef" * 2


def fuzz(examples: int) -> settings:
    """So many examples, the same in every run, however long each takes."""
    return settings(max_examples=EXAMPLES or examples, derandomize=not EXAMPLES, deadline=None, database=None)


# --- what one finds ---

any_text = st.text(st.characters(), max_size=20)  # lone surrogates, NUL and line feeds too
any_count = st.one_of(
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 10**4000]),
)
scalars = st.one_of(st.none(), st.booleans(), any_count, st.floats(), any_text)
any_json = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(any_text, inner, max_size=4)),
    max_leaves=8,
)

PATHS = (
    "a",
    "a/b",
    "a/b/c",
    "A",
    "ü",
    "..",
    ".",
    "",
    "/etc/passwd",
    "../beside/precious",
    "a/../../beside/precious",
    "a//b",
    "./a",
    "a\\b",
    "C:/a",
    "a\0b",
    "a\nb",
    "\ud800",
    "\udcff",
    "link out",
    "link out/precious",
    "link to the file",
    "link inside/b",
    "loop",
    "loop/a",
    "x" * 300,
    "x/" * 300 + "x",
    "x/" * 5000 + "x",
    MANIFEST_NAME,
    "_safe_trainer/generation.json",
    " ",
    "~",
    "-rf",
    "%s{}",
)
any_path = st.one_of(
    st.sampled_from(PATHS),
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=4).map("/".join),
    any_text,
)

bytes_of_a_number = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from(
        [b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"[" * 2000, b"\x80\x02", b"PK\x03\x04"]
    ),
)


@st.composite
def spliced(draw: st.DrawFn, original: bytes) -> bytes:
    """``original`` with up to three pieces replaced, taken out, or put in; mostly near its ends, where formats are."""
    content = original
    for _ in range(draw(st.integers(1, 3))):
        length = len(content)
        from_end = draw(st.booleans())
        distance = draw(st.one_of(st.integers(0, length), st.integers(0, min(64, length))))
        at = length - distance if from_end else distance
        patch = draw(bytes_of_a_number)
        cut = draw(st.sampled_from([0, len(patch), len(patch), length // 2]))
        content = content[:at] + patch + content[at + cut :]
    return content


# --- where ---


def snapshot(directory: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below ``directory`` with mode, time and content; links are not followed."""
    found = {}
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            info = path.lstat()
            is_file = stat.S_ISREG(info.st_mode)
            content = path.read_bytes() if is_file else os.fsencode(os.readlink(path)) if path.is_symlink() else b""
            found[str(path)] = (info.st_mode, info.st_mtime_ns, info.st_size if is_file else 0, content)
    return found


@contextlib.contextmanager
def a_run_directory() -> Iterator[Path]:
    """A run directory with precious files beside it; afterwards they are as they were, and nothing has been added."""
    with tempfile.TemporaryDirectory(prefix="safe-trainer-fuzz-") as scratch:
        root = Path(scratch, "run")
        root.mkdir()
        write_files(Path(scratch, "beside"), {"precious": b"work of a month", "trash/old": b"kept"})
        before = snapshot(Path(scratch, "beside"))
        yield root
        assert snapshot(Path(scratch, "beside")) == before
        assert {entry.name for entry in Path(scratch).iterdir()} == {"run", "beside"}


def add_links(checkpoint: Path) -> None:
    """The links that ``PATHS`` names."""
    for name, target in {
        "link out": "../../beside",
        "link to the file": "../../beside/precious",
        "link inside": "a",
        "loop": "loop",
    }.items():
        (checkpoint / name).symlink_to(target)


@contextlib.contextmanager
def a_checkpoint(files: dict[str, bytes] | None = None) -> Iterator[Path]:
    with a_run_directory() as root:
        checkpoint = root / "checkpoint-10"
        write_files(checkpoint, files or {"a/b": b"content"})
        yield checkpoint


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Nothing that is waited for comes later than this; whatever becomes of the error on its way out."""
    late = []

    def interrupt(number: int, frame: object) -> None:
        late.append(number)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        assert not late, f"not done after {seconds} s"


# --- manifests ---

VALID = Manifest(
    step=10,
    save_id="save-1",
    scope="full",
    generation=1,
    world_size=2,
    saved_at="2026-01-01T00:00:00Z",
    saved_by={"host": "node0"},
    files=(FileEntry("a/b", 7, DIGEST, 0, 0o644), FileEntry("c", 0, DIGEST, 1, 0o600)),
    warnings=("one",),
)
DOCUMENT = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(VALID)}))


def check_length(*texts: str) -> None:
    """A damaged file must not become an error that nobody can read."""
    assert sum(map(len, texts)) < 100_000


def read(checkpoint: Path) -> Manifest | None:
    """The manifest, if it is one. Whatever is done with it then is safe, too."""
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        check_length(str(error))
        return None
    assert manifest is not None
    assert len({entry.path for entry in manifest.files}) == len(manifest.files)
    for entry in manifest.files:
        assert not PurePosixPath(entry.path).is_absolute()
        assert ".." not in entry.path.split("/")
        problem = file_problem(checkpoint, entry)
        assert problem is None or isinstance(problem, str)
    assert 0 <= manifest.total_bytes < 2**63 * (len(manifest.files) + 1)
    with tempfile.TemporaryDirectory() as copy:
        manifest.write(Path(copy))
        assert Manifest.read(Path(copy)) == manifest
    return manifest


def judge(checkpoint: Path) -> None:
    """What resuming asks of a checkpoint on one disk, all of it."""
    for verify in ("off", "size", "digest"):
        verdict = inspect_checkpoint(checkpoint, verify=verify)  # type: ignore[arg-type]
        assert all(isinstance(problem, str) for problem in verdict.problems)
        check_length(*verdict.problems)
    try:
        files = list_files(checkpoint)
    except CheckpointError:
        return
    size = saved_world_size(checkpoint, files)
    assert size is None or 0 < size < 2**63
    for path in files:
        for thorough in (False, True):
            structure_problem(checkpoint / path, thorough=thorough)
    with contextlib.suppress(CheckpointError):
        tensorless_weights(checkpoint, files)


@fuzz(150)
@given(content=st.one_of(st.binary(), spliced(json.dumps(DOCUMENT).encode())))
@example(content=b"[" * 100_000)
@example(content=b'{"a":' * 100_000)
@example(content=json.dumps(DOCUMENT).encode().replace(b'"save-1"', b"1" * 5000))
@example(content=b"\xef\xbb\xbf" + json.dumps(DOCUMENT).encode())
def test_any_bytes_are_a_manifest_or_an_error_of_ours(content: bytes) -> None:
    with a_checkpoint() as checkpoint:
        (checkpoint / MANIFEST_NAME).write_bytes(content)
        read(checkpoint)
        judge(checkpoint)


@fuzz(80)
@given(value=any_json)
def test_any_json_is_a_manifest_or_an_error_of_ours(value: object) -> None:
    with a_checkpoint() as checkpoint:
        (checkpoint / MANIFEST_NAME).write_text(json.dumps(value))
        read(checkpoint)


DEEP = "[" * 900 + "]" * 900  # below the parser's own limit


@fuzz(200)
@given(field=st.sampled_from(sorted(DOCUMENT)), value=any_json)
@example(field="format", value=True)
@example(field="format", value=1.0)
@example(field="step", value=2**63)
@example(field="step", value=10**4000)
@example(field="step", value=float("nan"))
@example(field="save_id", value="\ud800")
@example(field="files", value=[*DOCUMENT["files"], DOCUMENT["files"][0]])
@example(field="files", value=[{**DOCUMENT["files"][0], "path": path} for path in ("a", "a/b")])
@example(field="files", value=[{**DOCUMENT["files"][0], "path": path} for path in ("a/b", "A/b")])
@example(field="files", value="x" * 100_000)
@example(field="scope", value=["full"])
def test_any_value_of_a_field_is_taken_or_refused(field: str, value: object) -> None:
    with a_checkpoint() as checkpoint:
        (checkpoint / MANIFEST_NAME).write_text(json.dumps({**DOCUMENT, field: value}))
        read(checkpoint)
        judge(checkpoint)


@pytest.mark.parametrize("field", sorted(DOCUMENT))
def test_any_field_can_be_nested_deep(field: str) -> None:
    text = json.dumps({**DOCUMENT, field: "here"}).replace('"here"', DEEP)
    with a_checkpoint() as checkpoint:
        (checkpoint / MANIFEST_NAME).write_text(text)
        assert read(checkpoint) is None


@fuzz(200)
@given(field=st.sampled_from(["size", "digest", "rank", "mode"]), value=any_json)
@example(field="size", value=2**63)
@example(field="rank", value=2**63)
@example(field="digest", value="\ud800")
@example(field="digest", value="")
@example(field="digest", value=DIGEST.upper())
@example(field="mode", value=0o10000)
def test_any_value_of_a_files_field_is_taken_or_refused(field: str, value: object) -> None:
    with a_checkpoint() as checkpoint:
        files = [{**DOCUMENT["files"][0], field: value}]
        (checkpoint / MANIFEST_NAME).write_text(json.dumps({**DOCUMENT, "files": files}))
        manifest = read(checkpoint)
        assert manifest is None or type(manifest.files[0].size) is int
        judge(checkpoint)


@fuzz(200)
@given(paths=st.lists(any_path, min_size=1, max_size=3))
@example(paths=["\ud800"])
@example(paths=["a\0b"])
@example(paths=["a/b", "a/b"])
@example(paths=["a", "a/b"])
@example(paths=["x" * 300])
@example(paths=["x/" * 5000 + "x"])
@example(paths=["link out/precious"])
@example(paths=["link to the file"])
@example(paths=["loop/a"])
def test_any_paths_are_inside_or_refused(paths: list[str]) -> None:
    with a_checkpoint() as checkpoint:
        add_links(checkpoint)
        files = [{**DOCUMENT["files"][0], "path": path} for path in paths]
        (checkpoint / MANIFEST_NAME).write_text(json.dumps({**DOCUMENT, "files": files}))
        manifest = read(checkpoint)
        if manifest is not None:
            assert [entry.path for entry in manifest.files] == paths
        judge(checkpoint)


def test_what_can_be_a_name_on_the_disk_can_be_one_in_a_manifest() -> None:
    """Names that are not UTF-8, and as long as the system takes them."""
    long = "/".join(["y" * 255] * 8)
    with a_checkpoint({os.fsdecode(b"\xff\xfe"): b"1", "\n": b"2", "x" * 255: b"3", long: b"4"}) as checkpoint:
        manifest = manifest_of(checkpoint)
        manifest.write(checkpoint)
        assert read(checkpoint) == manifest
        assert inspect_checkpoint(checkpoint, verify="digest").complete


# --- files without a manifest ---


@cache
def stock_files(kind: str) -> dict[str, bytes]:
    """A healthy checkpoint of the stock Trainer, by path."""
    with tempfile.TemporaryDirectory() as scratch:
        return contents(make_stock_checkpoint(Path(scratch), kind))


def one_of_each_kind() -> dict[str, bytes]:
    """One file of each format."""
    names = {
        "single": ["model.safetensors", "optimizer.pt", "training_args.bin", TRAINER_STATE_NAME, "rng_state.pth"],
        "ddp": ["model.safetensors.index.json"],
        "zero2": ["latest", "global_step10/mp_rank_00_model_states.pt"],
        "fsdp": ["optimizer_0/.metadata", "optimizer_0/__0_0.distcp"],
    }
    return {name: stock_files(kind)[name] for kind, files in names.items() for name in files}


@fuzz(250)
@given(data=st.data())
def test_any_damage_to_one_file_is_a_finding_or_none(data: st.DataObject) -> None:
    files = one_of_each_kind()
    name = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(st.one_of(spliced(files[name]), st.binary()))
    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch), {name: content})
        judge(Path(scratch))


@fuzz(60)
@given(value=any_json, name=st.sampled_from([TRAINER_STATE_NAME, "model.safetensors.index.json", "config.json"]))
@example(value=None, name=TRAINER_STATE_NAME)
@example(value={}, name=TRAINER_STATE_NAME)
@example(value={"global_step": "10"}, name=TRAINER_STATE_NAME)
@example(value={"weight_map": {"w": "../beside/precious"}}, name="model.safetensors.index.json")
@example(value={"weight_map": {"w": "/etc/passwd"}}, name="model.safetensors.index.json")
@example(value={"weight_map": {"w": "\0\ud800"}}, name="model.safetensors.index.json")
def test_any_json_in_a_stock_checkpoint_is_judged(value: object, name: str) -> None:
    with a_checkpoint({**stock_files("ddp"), name: json.dumps(value).encode()}) as checkpoint:
        judge(checkpoint)
        complete = inspect_checkpoint(checkpoint, verify="size").complete
        if name == TRAINER_STATE_NAME:
            assert complete == (isinstance(value, dict) and type(value.get("global_step")) is int)
        if name == "model.safetensors.index.json":
            assert not complete


@fuzz(60)
@given(
    header=st.one_of(
        any_json,
        st.dictionaries(
            any_text,
            st.fixed_dictionaries({"dtype": any_json, "shape": any_json, "data_offsets": any_json}),
            max_size=3,
        ),
    ),
    length=st.one_of(st.none(), any_count.map(lambda count: count % 2**64)),
    rest=st.binary(max_size=64),
)
@example(header={}, length=2**63, rest=b"")
@example(header={}, length=2**63 - 8, rest=b"")
@example(header={}, length=2**64 - 1, rest=b"")
@example(header={"w": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}, length=None, rest=b"x" * 8)
@example(header={"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, length=None, rest=b"x" * 8)
@example(header={"w": {"dtype": "F32", "shape": [2], "data_offsets": [2**64 - 8, 0]}}, length=None, rest=b"x" * 8)
def test_any_safetensors_header_is_judged(header: object, length: int | None, rest: bytes) -> None:
    text = json.dumps(header).encode()
    with a_checkpoint(
        {"model.safetensors": struct.pack("<Q", len(text) if length is None else length) + text + rest}
    ) as checkpoint:
        judge(checkpoint)


@fuzz(60)
@given(tag=st.one_of(st.binary(max_size=100), any_path.map(lambda path: path.encode("utf-8", "surrogatepass"))))
@example(tag=b"")
@example(tag=b"..")
@example(tag=b"/")
@example(tag="ü".encode() * 5000)
@example(tag=b"x" * 1_000_000)
def test_any_tag_in_latest_is_judged(tag: bytes) -> None:
    with a_checkpoint({**stock_files("zero2"), "latest": tag}) as checkpoint:
        judge(checkpoint)
        assert inspect_checkpoint(checkpoint, verify="off").complete == (tag.strip() == b"global_step10")


@fuzz(30)
@given(
    names=st.lists(
        st.from_regex(
            r"rng_state_[0-9\u0660-\u0669]{1,30}\.pth|global_step10/(bf16_)?zero_pp_rank_[0-9]{1,30}_mp_rank_0_(optim|model)_states\.pt",
            fullmatch=True,
        ),
        min_size=1,
        max_size=3,
    )
)
@example(names=["rng_state_999999999.pth"])
@example(names=["rng_state_99999999999999999999.pth"])
@example(names=["global_step10/zero_pp_rank_999999999_mp_rank_00_optim_states.pt"])
@example(names=["rng_state_" + "9" * 200 + ".pth"])
@example(names=["global_step10/zero_pp_rank_99999999999999999999_mp_rank_00_optim_states.pt"])
def test_any_rank_in_a_name_is_judged(names: list[str]) -> None:
    """A number in a name is not a number of lines in an error."""
    for kind in ("ddp", "zero2"):
        with a_checkpoint({**stock_files(kind), **dict.fromkeys(names, b"")}) as checkpoint:
            judge(checkpoint)


@pytest.mark.parametrize("size", [-1, 0, 10**12, 10**5000], ids=["negative", "none", "many", "unspeakable"])
def test_any_recorded_world_size_is_judged(size: int) -> None:
    states = {"module": None, "dp_world_size": size, "mp_world_size": size}
    with a_checkpoint(stock_files("zero2")) as checkpoint:
        torch.save(states, checkpoint / "global_step10/mp_rank_00_model_states.pt")
        judge(checkpoint)
        assert saved_world_size(checkpoint, list_files(checkpoint)) == 4  # what the RNG states say


# --- things that are no files ---


def into_pipe(path: Path) -> None:
    os.mkfifo(path)


def into_directory(path: Path) -> None:
    path.mkdir()


def into_link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def into_loop(path: Path) -> None:
    path.symlink_to(path.name)


OTHER_THINGS: dict[str, Callable[[Path], None]] = {
    "a pipe": into_pipe,
    "a directory": into_directory,
    "an endless device": into_link("/dev/zero"),
    "a link out": into_link("../../beside/precious"),
    "a link to a directory outside": into_link("../../beside/trash"),
    "a link to itself": into_loop,
    "a link to nowhere": into_link("nowhere"),
}


@pytest.mark.parametrize("make", OTHER_THINGS.values(), ids=OTHER_THINGS)
@pytest.mark.parametrize("name", [MANIFEST_NAME, TRAINER_STATE_NAME, "latest", "model.safetensors", "optimizer.pt"])
def test_what_is_no_file_is_not_waited_for(name: str, make: Callable[[Path], None]) -> None:
    with a_checkpoint({**stock_files("single"), **stock_files("zero2")}) as checkpoint:
        manifest = manifest_of(checkpoint, step=10)
        manifest.write(checkpoint)
        (checkpoint / name).unlink()
        make(checkpoint / name)
        with within(20):
            judge(checkpoint)
            if name != MANIFEST_NAME:
                assert not inspect_checkpoint(checkpoint, verify="off").complete
                assert file_problem(checkpoint, manifest.by_path()[name]) is not None


def test_directories_that_are_nested_too_deep_are_a_finding() -> None:
    def body() -> list[str]:
        sys.setrecursionlimit(300)
        return list(inspect_checkpoint(checkpoint, verify="off").problems)

    with a_checkpoint() as checkpoint:
        manifest_of(checkpoint, step=10).write(checkpoint)
        (checkpoint / "/".join("d" * 300)).mkdir(parents=True)
        (problem,) = run_in_child(body)
        assert "nested too deeply" in problem


# --- bombs ---

SPARE_BYTES = 256 << 20


def in_little_memory(action: Callable[[], Any]) -> Any:
    """Run ``action`` in a process that may take 256 MiB more than it has, and little time."""

    def body() -> Any:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        with within(20):
            return action()

    return run_in_child(body)


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def _claiming_zip(path: Path) -> None:
    """A torch file whose one record says that it has 2**62 bytes."""
    torch.save({"a": 1}, path)
    content = path.read_bytes()
    at = content.rindex(b"PK\x01\x02")
    while content.rfind(b"PK\x01\x02", 0, at) >= 0:
        at = content.rfind(b"PK\x01\x02", 0, at)
    # sizes 0xffffffff say that the true ones are in a zip64 field
    extra = struct.pack("<HHQQ", 1, 16, 2**62, 2**62)
    name_length, extra_length = struct.unpack_from("<HH", content, at + 28)
    changed = bytearray(content[at : at + 46 + name_length])
    struct.pack_into("<II", changed, 20, 2**32 - 1, 2**32 - 1)
    struct.pack_into("<H", changed, 30, len(extra))
    rest = content[at + 46 + name_length + extra_length :]
    path.write_bytes(content[:at] + bytes(changed) + extra + rest)


def _deflated_zip(path: Path) -> None:
    """A few hundred kilobytes that unpack to 50 MB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N" * (50 << 20))


def _claiming_pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x" * 10)


def _long_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(path, 1 << 41)


BOMBS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a manifest of a terabyte": (MANIFEST_NAME, lambda path: _sparse(path, 1 << 40)),
    "a manifest that is nested deep": (MANIFEST_NAME, lambda path: path.write_bytes(b"[" * 10_000_000)),
    "a manifest of empty lists": (MANIFEST_NAME, lambda path: path.write_bytes(b"[" + b"[]," * 300_000 + b"[]]")),
    "a header of 2**63 bytes": ("model.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}")),
    "a header of a terabyte that is there": ("model.safetensors", _long_header),
    "a record of 2**62 bytes": ("optimizer.pt", _claiming_zip),
    "a record that unpacks to more": ("optimizer.pt", _deflated_zip),
    "model states that unpack to more": ("global_step10/mp_rank_00_model_states.pt", _deflated_zip),
    "a string of 2**40 bytes": ("optimizer_0/.metadata", _claiming_pickle),
    "a tag of a terabyte": ("latest", lambda path: _sparse(path, 1 << 40)),
}


@pytest.mark.parametrize(("name", "make"), BOMBS.values(), ids=BOMBS)
def test_what_claims_to_be_huge_is_refused_in_little_memory(name: str, make: Callable[[Path], object]) -> None:
    with a_checkpoint({**stock_files("fsdp"), **stock_files("zero2")}) as checkpoint:
        (checkpoint / name).unlink(missing_ok=True)
        make(checkpoint / name)
        verdicts = in_little_memory(
            lambda: [inspect_checkpoint(checkpoint, verify=verify).problems for verify in ("size", "digest")]  # type: ignore[arg-type]
        )
        assert all(any(name.rpartition("/")[2] in problem for problem in problems) for problems in verdicts)
        if name != MANIFEST_NAME:
            in_little_memory(lambda: saved_world_size(checkpoint, list_files(checkpoint)))


# --- the run directory's own state ---


@fuzz(100)
@given(content=st.one_of(st.binary(), any_json.map(lambda value: json.dumps(value).encode())))
@example(content=b"[" * 100_000)
@example(content=b'{"number": 1}')
@example(content=b'{"number": true}')
@example(content=b'{"number": 1e999}')
@example(content=b'{"number": -1}')
@example(content=b'{"number": 9223372036854775808}')
@example(content=b'{"number": ' + b"9" * 4300 + b"}")
@example(content=b'{"number": 1, "run_id": ["\\ud800"], "host": "\\ud800", "pid": null}')
def test_any_generation_is_taken_over_or_refused(content: bytes) -> None:
    with a_run_directory() as root:
        start_run(root)
        directory = RunDirectory(root, lock_timeout_s=1.0)
        directory.layout.generation_file.write_bytes(content)
        for use in (directory.newest_generation, directory.check_generation, lambda: start_in(root)):
            with contextlib.suppress(CheckpointError):
                use()


# --- names and lengths from other ranks ---


@fuzz(200)
@given(path=any_path)
@example(path="\ud800")
@example(path="x/" * 5000 + "x")
@example(path="loop/a")
def test_any_path_resolves_inside_or_is_refused(path: str) -> None:
    with a_checkpoint() as checkpoint:
        add_links(checkpoint)
        try:
            target = resolve_inside(checkpoint, path)
        except UnsafePathError:
            return
        assert Path(os.path.realpath(target)).is_relative_to(os.path.realpath(checkpoint))


class Stranger:
    """A channel to a sender that says what it likes."""

    rank, world_size, host, others_failed = 0, 2, "here", False

    def __init__(self, content: bytes) -> None:
        self._content = content

    def receive(self, buffer: torch.Tensor, *, from_rank: int) -> None:
        piece = (self._content * (len(buffer) // max(len(self._content), 1) + 1))[: len(buffer)]
        buffer.copy_(torch.frombuffer(bytearray(piece.ljust(len(buffer), b"\0")), dtype=torch.uint8))

    def start_receive(self, buffer: torch.Tensor, *, from_rank: int) -> Stranger:
        self.receive(buffer, from_rank=from_rank)
        return self

    def wait(self) -> None:
        """As what has been received already."""

    def send(self, buffer: torch.Tensor, *, to_rank: int) -> None:
        raise AssertionError("nothing is sent from here")

    def tell(self, error: BaseException) -> None:
        assert isinstance(error, Exception)


def to_here(path: str, *, size: int = 1, mode: int = 0o644) -> Shipment:
    return Shipment(path, size, mode, 0, size, 1, 0)


any_shipment = st.builds(to_here, any_path, size=st.integers(0, 100), mode=any_count)


@fuzz(100)
@given(plan=st.lists(any_shipment, min_size=1, max_size=2), content=st.binary(max_size=8))
@example(plan=[to_here("link out/new")], content=b"\0")
@example(plan=[to_here("link to the file")], content=b"\0")
@example(plan=[to_here("a/b")], content=b"\0")
@example(plan=[to_here("new/\ud800")], content=b"\0")
@example(plan=[to_here("new", mode=10**30)], content=b"\0")
@example(plan=[to_here("new")], content=b"\1")
def test_anything_on_the_wire_ends_in_a_new_file_inside_or_an_error(plan: list[Shipment], content: bytes) -> None:
    with a_checkpoint({"a/b": b"content"}) as checkpoint:
        add_links(checkpoint)
        stranger: Any = Stranger(content)
        with contextlib.suppress(CheckpointError, OSError):  # the file system's own errors: `together` wraps them
            ship(stranger, plan, source_root=None, destination_root=checkpoint)
        assert (checkpoint / "a/b").read_bytes() == b"content"


# --- all of it: a damaged run directory is resumed from what is whole in it, or refused ---


def start_in(root: Path, **options: Any) -> Any:
    options = {"lock_timeout_s": 5.0, "visibility_timeout_s": 0.2} | options
    return open_run(
        root, channel=Channel.open(timeout_s=5.0), options=CheckpointOptions(**options), saved_by={"test": "1"}
    )


FILES = {
    "model.safetensors": struct.pack("<Q", 2) + b"{}",
    "trainer_state.json": b'{"global_step": 1}',
    "global_step1/shard.pt": b"some state",
    "global_step1/other.pt": b"some more",
}
EVERYTHING = (*FILES, MANIFEST_NAME)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def damages() -> st.SearchStrategy[Callable[[Path], None]]:
    """What can happen to a file."""

    def write(content: bytes) -> Callable[[Path], None]:
        return _replace(lambda path: path.write_bytes(content))

    def cut(share: float) -> Callable[[Path], None]:
        return lambda path: os.truncate(path, int(path.stat().st_size * share))

    def flip(at: int) -> Callable[[Path], None]:
        def damage(path: Path) -> None:
            content = bytearray(path.read_bytes())
            content[at % len(content)] ^= 1
            path.write_bytes(content)

        return damage

    return st.one_of(
        st.binary(max_size=30).map(write),
        any_json.map(lambda value: write(json.dumps(value).encode())),
        st.floats(0, 0.99).map(cut),
        st.integers(0, 5000).map(flip),
        st.sampled_from([_replace(make) for make in OTHER_THINGS.values()]),
        st.just(Path.unlink),
    )


@fuzz(60)
@given(
    damage=st.lists(st.tuples(st.sampled_from([2, 3]), st.sampled_from(EVERYTHING), damages()), max_size=4),
    verify=st.sampled_from(["digest", "digest", "size", "off"]),
)
def test_a_damaged_run_directory_is_resumed_from_what_is_whole_in_it(
    damage: list[tuple[int, str, Callable[[Path], None]]], verify: str
) -> None:
    """Of the steps 1, 2 and 3, the first stays whole. With every byte read, only what is as saved is resumed from."""
    with a_run_directory() as root:
        for step in (1, 2, 3):
            make_checkpoint(root, step, FILES)
        for step, name, harm in {(step, name): (step, name, harm) for step, name, harm in damage}.values():
            harm(root / f"checkpoint-{step}" / name)
        touched = {step for step, _, _ in damage}
        newest_whole = max({1, 2, 3} - touched)

        with within(20):
            resumption = resume_latest(start_in(root, verify=verify))

        assert resumption is not None
        assert resumption.step is not None
        assert resumption.step >= newest_whole
        if verify == "digest" and (resumption.path / MANIFEST_NAME).exists():
            assert contents(resumption.path) == FILES


@pytest.mark.parametrize("make", OTHER_THINGS.values(), ids=OTHER_THINGS)
@pytest.mark.parametrize("name", ["generation.json", "lock", "staging", "delivered", "replaced", "tokens", "trash"])
def test_whatever_lies_in_the_place_of_ours_a_run_starts_or_says_why_not(
    name: str, make: Callable[[Path], None]
) -> None:
    with a_run_directory() as root:
        make_checkpoint(root, 1, FILES)
        start_run(root)
        with contextlib.suppress(FileNotFoundError):
            (root / "_safe_trainer" / name).unlink()
        make(root / "_safe_trainer" / name)
        assert in_little_memory(lambda: files_to_resume_from(root)) in (FILES, None)


def files_to_resume_from(root: Path) -> dict[str, bytes] | None:
    """The files of the checkpoint that a new run chooses; None where it refuses to start."""
    try:
        with within(5):
            resumption = resume_latest(start_in(root))
    except CheckpointError:
        return None
    return {} if resumption is None else contents(resumption.path)


@pytest.mark.parametrize("name", ["train.py", "checkpoint-x"])
def test_what_is_no_checkpoint_is_not_put_back_over_the_users_files(name: str) -> None:
    with a_run_directory() as root:
        start_run(root)
        write_files(root, {name: b"the user's", f"_safe_trainer/replaced/{name}": b"a stranger's"})
        with contextlib.suppress(CheckpointError):
            start_in(root)
        assert (root / name).read_bytes() == b"the user's"


# --- the lock's claim, and the record of a commit in pieces ---

CLAIM = {"nonce": "n", "host": "here", "pid": 1, "process": "", "taken_at": "2026-01-01T00:00:00Z"}


@fuzz(80)
@given(
    content=st.one_of(
        st.binary(),
        any_json.map(lambda value: json.dumps(value).encode()),
        st.builds(
            lambda field, value: json.dumps({**CLAIM, field: value}).encode(),
            st.sampled_from(sorted(CLAIM)),
            st.one_of(any_json, any_path),
        ),
    )
)
@example(content=b"[" * 100_000)
@example(content=json.dumps({**CLAIM, "pid": 2**70}).encode())
@example(content=json.dumps({**CLAIM, "pid": 10**4000}).encode())
@example(content=json.dumps({**CLAIM, "nonce": "\ud800"}).encode())
@example(content=json.dumps({**CLAIM, "nonce": "a\0b"}).encode())
@example(content=json.dumps({**CLAIM, "nonce": "x" * 300}).encode())
@example(content=json.dumps({**CLAIM, "nonce": "/../../../beside/precious"}).encode())
def test_any_claim_is_respected_or_taken_over(content: bytes) -> None:
    with a_run_directory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr("safe_trainer.lock.LEASE_S", 0.01)
        patch.setattr("safe_trainer.lock.LOCK_POLL_INTERVAL_S", 0.005)
        area = RunLayout(root).area
        area.mkdir()
        guard = ClaimGuard(area / "claim", short_lived=area / "tokens", trash=area / "trash")
        (area / "claim").write_bytes(content)
        with contextlib.suppress(CheckpointError), guard.hold(timeout_s=1.0) as check:
            check()


RECORD = {"name": "checkpoint-10", "staged": "_safe_trainer/staging/a-save/checkpoint-10", "files": {"a/b": 7}}


@fuzz(150)
@given(
    record=st.one_of(
        any_json,
        st.fixed_dictionaries(
            {
                "name": st.one_of(st.just("checkpoint-10"), any_json),
                "staged": st.one_of(st.just(RECORD["staged"]), any_path, any_json),
                "files": st.one_of(st.dictionaries(any_path, any_json, max_size=3), any_json),
            }
        ),
    )
)
@example(record=RECORD)
@example(record={**RECORD, "staged": ""})
@example(record={**RECORD, "staged": 5})
@example(record={**RECORD, "staged": []})
@example(record={**RECORD, "staged": "\ud800"})
@example(record={**RECORD, "staged": "checkpoint-9", "files": {path: len(content) for path, content in FILES.items()}})
@example(record={**RECORD, "staged": "link"})
@example(record={**RECORD, "files": {"a/b": 1e400}})
@example(record={**RECORD, "files": {"../../beside/precious": 15}})
@example(record={**RECORD, "name": ["checkpoint-10"]})
def test_any_record_of_a_commit_in_pieces_is_carried_out_or_refused(record: object) -> None:
    """Whatever it says, another checkpoint keeps its files."""
    with a_run_directory() as root:
        layout = RunLayout(root)
        make_checkpoint(root, 9, FILES)
        (root / "link").symlink_to("../beside")
        write_files(root / str(RECORD["staged"]), {"a/b": b"content"})
        write_files(layout.committing, {"checkpoint-10.json": json.dumps(record).encode()})
        with contextlib.suppress(CheckpointError, OSError):
            finish_pieces(layout)
        assert contents(root / "checkpoint-9") == FILES
