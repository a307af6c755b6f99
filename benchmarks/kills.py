"""Kills at random moments: does every run go on at the bits of one that nothing happened to?

    python -m benchmarks.kills [--kills 20] [--seed 0] [--json benchmarks/results/kills.json]

Runs have one or two ranks in turn. SIGKILL hits one rank, drawn at random, after a time drawn at random: in a pass, in a
reduction, in the middle of writing a checkpoint, whatever it is at. Where there is another rank, its last words are kept.
The run then goes on from its newest checkpoint, of within an epoch or of its end.

A second part moves one run from four ranks to two and to one, by kills as well, and compares it with a run on one rank.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.durable_run import Setting, results, start
from benchmarks.processes import finish
from benchmarks.provenance import provenance
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout import read_checkpoint

Row = dict[str, Any]
EPOCHS = 20


def whole_run(setting: Setting) -> list[dict[str, Tensor]]:
    """Run to the end.

    Args:
        setting: The run.

    Returns:
        What each rank has learned.

    Raises:
        RuntimeError: If a process fails.
    """
    codes = finish(start(setting))
    if any(codes):
        raise RuntimeError(f"Ended with {codes}:\n{(setting.folder / 'rank0.log').read_text('utf-8')}")
    return results(setting)


def newest(folder: Path) -> tuple[Path | None, int, list[str]]:
    """Find the checkpoint that is furthest on.

    Args:
        folder: Of a run that was killed.

    Returns:
        The file, None if there is none yet; its number of updates; and the names of files that cannot be read.
    """
    best, updates, unreadable = None, 0, []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            found = int(read_checkpoint(path)["global_step"])
        except PosteriorError:
            unreadable.append(path.name)
            continue
        if found > updates:
            best, updates = path, found
    return best, updates, unreadable


def wait_until_written(path: Path, processes: list[Any]) -> None:
    """Wait for a run's first checkpoint, so that importing and connecting are over, or for the run's end."""
    while not path.exists() and all(process.is_alive() for process in processes):
        time.sleep(0.001)


def kill_at_random(
    setting: Setting, victim: int, seconds: float, first: str = "within.ckpt"
) -> tuple[list[int], float]:
    """Start a run and kill one of its processes.

    Args:
        setting: The run.
        victim: Which process.
        seconds: How long after the first checkpoint.
        first: Name of that checkpoint.

    Returns:
        Exit codes, and the seconds from the kill until all processes had ended.
    """
    processes = start(setting)
    wait_until_written(setting.folder / first, processes)
    time.sleep(seconds)
    processes[victim].kill()
    killed = time.monotonic()
    return finish(processes, 60), time.monotonic() - killed


def same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    """Whether all ranks have learned the same, bit for bit."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected, strict=True)
    )


def one_kill(ranks: int, folder: Path, length: float, expected: list[dict[str, Tensor]], draw: random.Random) -> Row:
    """Kill a run at a random moment and go on from its newest checkpoint.

    Args:
        ranks: Number of processes.
        folder: An empty one.
        length: Seconds that a run takes after its first checkpoint.
        expected: What a run that nothing happened to has learned.
        draw: Source of the moment and of the rank.

    Returns:
        What happened.
    """
    setting, victim = Setting(folder, ranks=ranks, epochs=EPOCHS, answer_seconds=1.0), draw.randrange(ranks)
    codes, seconds = kill_at_random(setting, victim, length * draw.random())
    row: Row = {"ranks": ranks, "victim": victim, "codes": codes, "seconds_until_all_ended": seconds}
    row["named"] = ranks == 1 or f"Rank {victim} does not answer" in (folder / f"rank{1 - victim}.log").read_text(
        "utf-8"
    )
    path, row["updates"], row["unreadable"] = newest(folder)
    row["checkpoint"] = None if path is None else path.name
    found = whole_run(replace(setting, resume=path))
    return {**row, "same_bits": same_bits(found, expected)}


def random_kills(count: int, seed: int, folder: Path) -> list[Row]:
    """Kill runs of one and of two ranks in turn.

    Args:
        count: How many kills that hit a run before its end.
        seed: Of the moments.
        folder: For all runs.

    Returns:
        One row for each kill.
    """
    draw, rows = random.Random(seed), []
    whole = {ranks: timed_run(Setting(folder / f"whole{ranks}", ranks=ranks, epochs=EPOCHS)) for ranks in (1, 2)}
    for attempt in range(10 * count):
        ranks = 1 + len(rows) % 2
        row = one_kill(ranks, folder / f"kill{attempt}", *whole[ranks], draw)
        if -9 in row["codes"]:  # otherwise it had ended before
            rows.append(row)
            print(in_words(row), flush=True)
        if len(rows) == count:
            break
    return rows


def timed_run(setting: Setting) -> tuple[float, list[dict[str, Tensor]]]:
    """A run that nothing happens to.

    Args:
        setting: The run.

    Returns:
        Seconds from its first checkpoint to its end, and what each rank has learned.
    """
    processes = start(setting)
    wait_until_written(setting.folder / "within.ckpt", processes)
    begun = time.monotonic()
    finish(processes)
    return time.monotonic() - begun, results(setting)


def fewer_and_fewer(whole: Setting, folder: Path, checkpoint: str, draw: random.Random) -> Row:
    """Begin on four ranks, go on with two after a kill, and on one after another; each rank's share doubles.

    Args:
        whole: The same run on one rank.
        folder: An empty one.
        checkpoint: Name of the file to go on from.
        draw: Source of the moments.

    Returns:
        The updates at which the run moved, and the largest difference of anything it has learned from the run on one rank.
    """
    length, (expected,) = timed_run(whole)
    path, moves = None, []
    for ranks in (4, 2):
        stage = replace(
            whole,
            folder=folder / str(ranks),
            ranks=ranks,
            micro_batches=max(1, whole.micro_batches // ranks),
            answer_seconds=1.0,
            resume=path,
        )
        kill_at_random(stage, draw.randrange(ranks), 0.5 * length * draw.random(), checkpoint)
        # Of two at an epoch's last update, `newest` takes the one of its end: after the other and a second kill Lightning
        # makes updates of an epoch twice, also without this package (tests/faults/test_lightning_epochs.py).
        path = newest(stage.folder)[0] if checkpoint == "within.ckpt" else stage.folder / checkpoint
        assert path is not None
        moves.append(int(read_checkpoint(path)["global_step"]))
    (found,) = whole_run(replace(whole, folder=folder / "1", resume=path))
    difference = max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)
    groups = "one noise group" if whole.groups == 1 else f"{whole.groups} noise groups"
    return {"what": f"{groups}, {checkpoint}", "moved_at_updates": moves, "largest_difference": difference}


def world_sizes(seed: int, folder: Path) -> list[Row]:
    """Both ways in which a run may change its number of ranks and stay the same run.

    Args:
        seed: Of the moments.
        folder: For all runs.

    Returns:
        With the same noise on all ranks, within an epoch; and with noise of its own for each quarter of a batch, at the end
        of an epoch, because micro-batches are counted.
    """
    draw = random.Random(seed)
    shared = Setting(folder / "shared", groups=1, epochs=EPOCHS, batch_norm=False)
    own = Setting(folder / "own", groups=4, micro_batches=4, epochs=EPOCHS, batch_norm=False)
    rows = [
        fewer_and_fewer(shared, folder / "from4shared", "within.ckpt", draw),
        fewer_and_fewer(own, folder / "from4own", "epoch.ckpt", draw),
    ]
    for row in rows:
        print(
            "4 → 2 → 1 ranks, {what}: moved at updates {moved_at_updates}, off by {largest_difference:.1e}".format(
                **row
            )
        )
    return rows


def in_words(row: Row) -> str:
    """One line about a kill."""
    end = "the same bits" if row["same_bits"] else "OTHER BITS"
    other = f", named by the other: {row['named']}" if row["ranks"] == 2 else ""
    return (
        f"{row['ranks']} rank(s), rank {row['victim']} killed, "
        f"all ended after {row['seconds_until_all_ended']:.1f} s{other}; "
        f"went on from {row['checkpoint']} at update {row['updates']}: {end}"
        + (f"; UNREADABLE {row['unreadable']}" if row["unreadable"] else "")
    )


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each kill, then the sums; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        kills = random_kills(options.kills, options.seed, Path(folder))
        moves = world_sizes(options.seed, Path(folder))
    same = sum(row["same_bits"] for row in kills)
    slowest = max((row["seconds_until_all_ended"] for row in kills), default=0.0)
    print(
        f"{same} of {len(kills)} runs went on to the same bits; all processes had ended after {slowest:.1f} s at most"
    )
    if options.json:
        kept = {**provenance(), "seed": options.seed, "updates": 6 * EPOCHS, "kills": kills, "world_sizes": moves}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
