"""Many steps of every callback: does memory grow, do ranks drift apart, does the loss stay finite?

    python -m benchmarks.soak [--steps 10000] [--callbacks VOGN Vadam …] [--two-ranks VOGN] [--json FILE]

Each callback trains a small network in a process of its own, those of --two-ranks also on two ranks. Memory is the resident
set of the process after garbage has been collected and free pages have been given back, averaged over ten equal stretches
after the first tenth of the steps; its slope is that of the least-squares line through the ten, with its standard error. The
tensors that are alive are counted at both ends too: their number does not depend on the allocator. The ranks' hash is of all
weights and all state of the optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from benchmarks.processes import finish, results, start
from benchmarks.provenance import provenance
from lightning_bayes import VariationalCallback

Row = dict[str, Any]
STRETCHES = 10
NAMES = sorted(
    name.removesuffix("Callback")
    for name, value in vars(lightning_bayes).items()
    if isinstance(value, type) and issubclass(value, VariationalCallback) and value is not VariationalCallback
)


def slope(values: list[float], length: int) -> tuple[float, float]:
    """Least-squares slope per step through means over equal stretches.

    Args:
        values: Equally spaced values, at least three for each stretch.
        length: Steps between two of them.

    Returns:
        The slope and its standard error.

    Example:
        >>> [round(v, 6) for v in slope([float(i) for i in range(100)], 5)]
        [0.2, 0.0]
    """
    means = np.array([np.mean(part) for part in np.array_split(np.asarray(values), STRETCHES)])
    places = np.arange(STRETCHES) * len(values) / STRETCHES * length
    centred = places - places.mean()
    found = float(centred @ means / (centred @ centred))
    residuals = means - means.mean() - found * centred
    return found, math.sqrt(float(residuals @ residuals) / (STRETCHES - 2) / float(centred @ centred))


class Watch(Callback):
    """Notes memory, living tensors, losses and hashes in the course of a fit.

    Args:
        steps: How many the fit will have.
    """

    def __init__(self, steps: int) -> None:
        self.every, self.begin, self.hash_every = max(1, steps // 100), steps // 10, max(1, steps // 10)
        self.memory: list[float] = []
        self.tensors: list[int] = []
        self.hashes: list[str] = []
        self.not_finite, self.last_loss = 0, math.nan

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        """Look at what the step has left."""
        step, loss = trainer.global_step, float(outputs["loss"])
        self.last_loss, self.not_finite = loss, self.not_finite + (not math.isfinite(loss))
        if step in (self.begin, trainer.max_steps):
            gc.unfreeze()
            gc.collect()
            self.tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
            gc.freeze()  # what has been there before need not be looked through again and again
        if step > self.begin and step % self.every == 0:
            self.memory.append(resident_bytes())
        if step % self.hash_every == 0:
            self.hashes.append(hash_of(trainer))


def resident_bytes() -> float:
    """Memory that this process uses, from Linux' /proc: garbage is collected, and glibc gives free pages back, first."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: None)(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096.0 * pages


def hash_of(trainer: Trainer) -> str:
    """Hash all weights and buffers of the module and all tensors of the optimizer's state, in their order."""
    digest = hashlib.sha256()
    states = [state for _, state in sorted(trainer.optimizers[0].state_dict()["state"].items())]
    for value in _tensors([trainer.lightning_module.state_dict(), states]):
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [tensor for child in children for tensor in _tensors(child)]


class Net(LightningModule):
    """A network of 51 parameters on three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which the callback replaces."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def soak(rank: int, name: str, ranks: int, steps: int) -> Row:
    """Train one callback in this process.

    Args:
        rank: Which of the processes this is.
        name: Of the callback, without its ending.
        ranks: Number of processes.
        steps: Updates.

    Returns:
        What was noted.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(960, 4, generator=generator)
    data = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)
    watch, callback = Watch(steps), getattr(lightning_bayes, f"{name}Callback")()
    trainer = Trainer(
        callbacks=[callback, watch],
        strategy="bayes_ddp" if ranks > 1 else "auto",
        devices=ranks,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        barebones=True,
    )
    begun = time.monotonic()
    trainer.fit(Net(), data)
    found = {key: getattr(watch, key) for key in ("memory", "tensors", "hashes", "not_finite", "last_loss", "every")}
    return {**found, "seconds": time.monotonic() - begun}


def soak_in_processes(name: str, ranks: int, steps: int, folder: Path) -> Row:
    """Train one callback in processes of its own.

    Args:
        name: Of the callback, without its ending.
        ranks: Number of processes.
        steps: Updates.
        folder: An empty one.

    Returns:
        One row of the table.

    Raises:
        RuntimeError: If a process fails.
    """
    processes = start(soak, ranks, folder, name, ranks, steps)
    codes = finish(processes, 60 + steps)
    if any(codes):
        raise RuntimeError(
            f"{name} on {ranks} rank(s) ended with {codes}:\n{(folder / 'rank0.log').read_text('utf-8')}"
        )
    found = results(ranks, folder)
    growth, error = slope(found[0]["memory"], found[0]["every"])
    return {
        "callback": name,
        "ranks": ranks,
        "steps": steps,
        "bytes_per_step": growth,
        "standard_error": error,
        "resident_mib": found[0]["memory"][-1] / 2**20,
        "more_tensors": found[0]["tensors"][1] - found[0]["tensors"][0],
        "hash": found[0]["hashes"][-1],
        "ranks_agree": all(other["hashes"] == found[0]["hashes"] for other in found),
        "not_finite": sum(other["not_finite"] for other in found),
        "last_loss": found[0]["last_loss"],
        "seconds": found[0]["seconds"],
        "commit": provenance()["commit"],  # rows of one file may be of different code
    }


HEADER = f"{'callback':17}{'ranks':>6}{'steps':>7}{'bytes a step':>20}{'new tensors':>13}{'loss':>9}  {'hash':18}ranks"


def in_words(row: Row) -> str:
    """One line of the table."""
    growth = f"{row['bytes_per_step']:.1f} ± {row['standard_error']:.1f}"
    loss = f"{row['last_loss']:.4f}" if not row["not_finite"] else f"{row['not_finite']} BAD"
    agree = "alone" if row["ranks"] == 1 else "the same" if row["ranks_agree"] else "DIFFERENT"
    return (
        f"{row['callback']:17}{row['ranks']:6}{row['steps']:7}{growth:>20}{row['more_tensors']:13}{loss:>9}  "
        f"{row['hash']:18}{agree}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write JSON where asked, after every row, and go on from the rows that are in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--callbacks", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--two-ranks", nargs="*", default=["VOGN", "NoisyKFAC"], choices=NAMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.steps < 200:
        parser.error("--steps must be at least 200: a slope needs values")
    rows = json.loads(options.json.read_text("utf-8"))["rows"] if options.json and options.json.exists() else []
    print("\n".join([HEADER, *map(in_words, rows)]), flush=True)
    done = {(row["callback"], row["ranks"], row["steps"]) for row in rows}
    for ranks, names in ((1, options.callbacks), (2, options.two_ranks)):
        for name in names:
            if (name, ranks, options.steps) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows.append(soak_in_processes(name, ranks, options.steps, Path(folder)))
            print(in_words(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
