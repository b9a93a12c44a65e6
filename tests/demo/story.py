"""The demo's scenes, a function each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.numpy import load_file

from safe_trainer.integrity import file_problem, inspect_checkpoint
from safe_trainer.layout import AREA_NAME, MANIFEST_NAME, RunLayout, checkpoint_name, list_checkpoints, list_files
from safe_trainer.manifest import Manifest
from tests.cluster import Disks, Job, RemoteError
from tests.demo import NODES, RANKS, RANKS_PER_NODE
from tests.demo.observation import Observation, tensor_digest
from tests.demo.rank import run_safe, run_stock
from tests.demo.stage import MERGE_SCRIPT, Stage
from tests.demo.terminal import DemoError, Terminal, size
from tests.demo.train import MAX_STEPS, SAVE_STEPS

# The save that is committed before the power cut, the one that is cut, and the last one.
FIRST, SECOND, LAST = (checkpoint_name(step) for step in (SAVE_STEPS, 2 * SAVE_STEPS, MAX_STEPS))
ADAPTER = "adapter_model.safetensors"
LOSSES_SHOWN = 6


def tell(stage: Stage) -> None:
    """All scenes in order.

    Raises:
        DemoError: One of them does not show what it should.
    """
    stock = stock_trainer(stage)
    interrupt(stage)
    new_machine(stage)
    resumed = resume(stage, stock)
    merge(stage, resumed)


def stock_trainer(stage: Stage) -> list[Observation]:
    """What the stock Trainer leaves on two disks; also the run that the interrupted one has to equal."""
    terminal = stage.terminal
    terminal.section("The stock Trainer, for comparison")
    terminal.say(f"It trains {MAX_STEPS} steps without a break and saves every {SAVE_STEPS}.")
    seen = stage.observe(run_stock, stage.stock_disks)
    losses = _mean_losses(seen)
    _show_losses(terminal, losses)
    terminal.claim("It learns: the loss has fallen by more than a third.", losses[MAX_STEPS] < losses[1] * 2 / 3)
    _show_parts(terminal, stage.stock_disks)
    code, output = stage.merge(stage.stock_disks.node(0) / FIRST, stage.scratch / "stock")
    complaint = re.search(r"Expected 4 of .*? but found 2 files", output)
    terminal.claim(
        f"{MERGE_SCRIPT} on node 0 gives up: {complaint and complaint.group()}.", code != 0 and complaint is not None
    )
    return seen


def interrupt(stage: Stage) -> None:
    """SafeTrainer saves once, and the job is killed while it saves again."""
    terminal, disks = stage.terminal, stage.disks
    terminal.section("The same script with SafeTrainer")
    terminal.say("It starts afresh, on two empty disks.")
    slow_disk = {"stalling_file": _shard(RANKS[-1], SECOND)}
    with stage.job(run_safe, disks, slow_disk, one_disk=not stage.has_namespaces) as job:
        torn = stage.wait_for_file(job, disks.node(1), f"*/{SECOND}/{_shard(RANKS[-1], SECOND)}")
        _show_whole(terminal, disks.node(0) / FIRST, stage.stock_disks)
        terminal.section("A power cut in the middle of the next save")
        _kill(terminal, job)
    _show_ruins(terminal, disks, torn)


def new_machine(stage: Stage) -> None:
    """Node 1 loses its disk."""
    stage.terminal.section("Node 1 is replaced by a new machine")
    stage.disks.wipe(1)
    stage.terminal.claim("Its disk is empty.", not any(stage.disks.node(1).iterdir()))


def resume(stage: Stage, stock: Sequence[Observation]) -> list[Observation]:
    """The same script once more, to the end."""
    terminal, disks = stage.terminal, stage.disks
    terminal.section("The same command again")
    terminal.say('The script has trainer.train(resume_from_checkpoint="auto"); nobody copies files.')
    manifest = _manifest(disks.node(0) / FIRST)
    seen = stage.observe(run_safe, disks, one_disk=not stage.has_namespaces)
    _claim_delivered(terminal, seen, manifest)
    _show_losses(terminal, _mean_losses(seen))
    steps = [str(step) for step in range(SAVE_STEPS + 1, MAX_STEPS + 1)]
    terminal.claim(
        f"From step {steps[0]} to {steps[-1]} the losses equal those of the stock Trainer's run without a break, on "
        "every rank, bit for bit.",
        [rank["losses"] for rank in seen] == [{step: rank["losses"][step] for step in steps} for rank in stock],
    )
    _show_end(terminal, disks)
    return seen


def merge(stage: Stage, seen: Sequence[Observation]) -> None:
    """ZeRO's shards become one file of weights, on one node."""
    terminal = stage.terminal
    terminal.section("The shards become one file of weights")
    terminal.say(f"On node 0, in {LAST}:  python {MERGE_SCRIPT} . merged --safe_serialization")
    target = stage.scratch / "merged"
    code, _ = stage.merge(stage.disks.node(0) / LAST, target)
    terminal.claim("It succeeds: the shards of all four ranks are there.", code == 0)
    merged = {name: tensor_digest(array) for name, array in load_file(target / "model.safetensors").items()}
    terminal.claim(
        f"The {len(merged)} tensors in it, adapter and embeddings, equal the weights that each of the four ranks had "
        "in memory at the end, bit for bit.",
        all(rank["trained"] == merged for rank in seen) and len(merged) > 0,
    )


# --- Scenes in parts ----------------------------------------------------------------------------------------


def _show_parts(terminal: Terminal, disks: Disks) -> None:
    parts = [_sizes(disks.node(node) / FIRST) for node in range(NODES)]
    paths = sorted({path for part in parts for path in part})
    terminal.say(f"What it leaves of {FIRST} on each node's disk:")
    rows = [[*(size(part[path]) if path in part else "-" for part in parts), path] for path in paths]
    terminal.table([["node 0", "node 1", "file"], *rows], right=[0, 1])
    terminal.claim(
        "Each node has the optimizer shards of its own two ranks only: neither disk has the whole checkpoint.",
        [[rank for rank in RANKS if _shard(rank, FIRST) in part] for part in parts] == [[0, 1], [2, 3]],
    )


def _show_whole(terminal: Terminal, checkpoint: Path, stock_disks: Disks) -> None:
    files = _manifest(checkpoint).files
    terminal.say(f"{checkpoint.name} on node 0, and which rank wrote each file, as its {MANIFEST_NAME} says:")
    rows = [
        [size(entry.size), f"rank {entry.rank}", "from node 1" if entry.rank >= RANKS_PER_NODE else "", entry.path]
        for entry in files
    ]
    terminal.table(rows, right=[0])
    terminal.claim(
        f"It is whole: {len(files)} files, each of the size and with the digest in the manifest.", _is_whole(checkpoint)
    )
    left_by_stock = {path for node in range(NODES) for path in _sizes(stock_disks.node(node) / checkpoint.name)}
    terminal.claim(
        "These are the files that the stock Trainer left on both disks together, no more and no less.",
        {entry.path for entry in files} == left_by_stock,
    )
    terminal.claim(
        f"The trained weights in {ADAPTER} are the stock Trainer's, byte for byte.",
        (checkpoint / ADAPTER).read_bytes() == (stock_disks.node(0) / checkpoint.name / ADAPTER).read_bytes(),
    )


def _kill(terminal: Terminal, job: Job) -> None:
    terminal.say(
        f"The job is at its second save, and rank {RANKS[-1]} has written half of its optimizer shard. Now every "
        "process gets SIGKILL."
    )
    job.kill_all()
    terminal.claim(
        "All four ranks are dead, none had finished.",
        all(isinstance(result, RemoteError) and result.type == "Died" for result in job.results()),
    )


def _show_ruins(terminal: Terminal, disks: Disks, torn: Path) -> None:
    terminal.say("What is left:")
    _show_disks(terminal, disks)
    found, whole = torn.stat().st_size, (disks.node(0) / FIRST / _shard(RANKS[-1], FIRST)).stat().st_size
    terminal.claim(
        f"The save was cut in the middle: {torn.name} has {size(found)}; at the first save it had {size(whole)}.",
        found < whole,
    )
    terminal.claim(
        f"The half-written files are in the staging area. Nothing on node 0 is named checkpoint-N but {FIRST}, which "
        "is whole.",
        AREA_NAME in torn.parts and _checkpoints(disks.node(0)) == [FIRST] and _is_whole(disks.node(0) / FIRST),
    )


def _claim_delivered(terminal: Terminal, seen: Sequence[Observation], manifest: Manifest) -> None:
    places = [Path(rank["resumed_from"] or "") for rank in seen]
    terminal.claim(
        f"All four ranks went on from {FIRST}.",
        all(place.name == FIRST for place in places) and all(rank["first_step"] == SAVE_STEPS for rank in seen),
    )
    expected = {entry.path: entry.digest for entry in manifest.files}
    loaded = [
        {path: digest for path, digest in rank["resumed_files"].items() if path != MANIFEST_NAME} for rank in seen
    ]
    terminal.claim(
        f"Node 1, whose disk was empty, was sent all {len(expected)} files ({size(manifest.total_bytes)}) before "
        "training began, each with the digest in the manifest.",
        all(files == expected for files in loaded) and all(AREA_NAME in place.parts for place in places[2:]),
    )


def _show_end(terminal: Terminal, disks: Disks) -> None:
    terminal.say("What is on the disks now:")
    _show_disks(terminal, disks)
    names = _checkpoints(disks.node(0))
    terminal.claim(
        f"Node 0 has {len(names)} checkpoints, every one whole.",
        len(names) == MAX_STEPS // SAVE_STEPS and all(_is_whole(disks.node(0) / name) for name in names),
    )
    layouts = [RunLayout(disks.node(node)) for node in range(NODES)]
    terminal.claim(
        "The half-written save is gone, and so is the copy that node 1 was sent.",
        not any(directory.exists() for layout in layouts for directory in (layout.staging, layout.delivered)),
    )


# --- Showing ------------------------------------------------------------------------------------------------


def _show_losses(terminal: Terminal, losses: Mapping[int, float]) -> None:
    """Some of the losses, from the first to the last."""
    steps = sorted(losses)
    last = len(steps) - 1
    shown = [steps[index * last // (LOSSES_SHOWN - 1)] for index in range(LOSSES_SHOWN)]
    rows = [["step", *map(str, shown)], ["loss", *(f"{losses[step]:.2f}" for step in shown)]]
    terminal.table(rows, right=range(1, LOSSES_SHOWN + 1))


def _mean_losses(seen: Sequence[Observation]) -> dict[int, float]:
    """The loss of each step, averaged over the ranks."""
    return {
        int(step): sum(float.fromhex(rank["losses"][step]) for rank in seen) / len(seen) for step in seen[0]["losses"]
    }


def _show_disks(terminal: Terminal, disks: Disks) -> None:
    """The checkpoints, and the saves that are not finished, on each disk."""
    rows = []
    for node in range(NODES):
        layout = RunLayout(disks.node(node))
        unfinished = sorted(layout.staging.glob("*/checkpoint-*"))
        for path in [*(path for _, path in list_checkpoints(layout.root)), *unfinished]:
            place = path.relative_to(layout.root)
            rows.append([f"node {node}", f"{place}/", f"{len(_sizes(path))} files", _state(path)])
    terminal.table(rows, right=[2])


# --- Looking ------------------------------------------------------------------------------------------------


def _shard(rank: int, checkpoint: str) -> str:
    """Where DeepSpeed puts a rank's part of the optimizer's state, in a checkpoint."""
    step = checkpoint.rpartition("-")[2]
    return f"global_step{step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _checkpoints(run_directory: Path) -> list[str]:
    return [path.name for _, path in list_checkpoints(run_directory)]


def _sizes(checkpoint: Path) -> dict[str, int]:
    """The files of a checkpoint as the Trainer knows it, without the manifest."""
    return {path: info.size for path, info in list_files(checkpoint).items() if path != MANIFEST_NAME}


def _manifest(checkpoint: Path) -> Manifest:
    manifest = Manifest.read(checkpoint)
    if manifest is None:
        raise DemoError(f"{checkpoint} has no manifest")
    return manifest


def _state(checkpoint: Path) -> str:
    verdict = inspect_checkpoint(checkpoint, verify="digest")
    if verdict.manifest is None:
        return "not finished"
    if _damaged(checkpoint, verdict.manifest):
        return "DAMAGED"
    return "this node's part" if verdict.is_part else "whole"


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint has a manifest and, byte for byte, everything that was saved."""
    verdict = inspect_checkpoint(checkpoint, verify="digest")
    return verdict.complete and verdict.manifest is not None and not _damaged(checkpoint, verdict.manifest)


def _damaged(checkpoint: Path, manifest: Manifest) -> bool:
    return any(file_problem(checkpoint, entry) is not None for entry in manifest.files)
