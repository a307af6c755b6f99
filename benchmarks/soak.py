"""Long runs of every callback: memory growth, agreement of ranks, finite losses.

    python -m benchmarks.soak [--steps 10000] [--callbacks VOGN Vadam …] [--two-ranks VOGN] [--json FILE]

Each callback trains a small network in a separate process; those in --two-ranks also train on two ranks. Memory is the
resident set after garbage collection and the return of free pages, averaged over ten equal intervals after the first tenth
of the steps. Its slope, with a standard error, is that of the least-squares line through the ten averages. The number of
live tensors is counted at both ends, because it does not depend on the allocator. The hash of a rank covers all weights and
the whole state of the optimizer.
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
from benchmarks.provenance import provenance, save_json
from lightning_bayes import VariationalCallback

Row = dict[str, Any]
INTERVALS = 10
NAMES = sorted(
    name.removesuffix("Callback")
    for name, value in vars(lightning_bayes).items()
    if isinstance(value, type) and issubclass(value, VariationalCallback) and value is not VariationalCallback
)


def slope(values: list[float], length: int) -> tuple[float, float]:
    """Least-squares slope per step through means over equal intervals.

    Args:
        values: Equally spaced values, at least three per interval.
        length: Steps between two values.

    Returns:
        The slope and its standard error.

    Example:
        >>> [round(v, 6) for v in slope([float(i) for i in range(100)], 5)]
        [0.2, 0.0]
    """
    means = np.array([np.mean(part) for part in np.array_split(np.asarray(values), INTERVALS)])
    steps = np.arange(INTERVALS) * len(values) / INTERVALS * length
    centred = steps - steps.mean()
    estimate = float(centred @ means / (centred @ centred))
    residuals = means - means.mean() - estimate * centred
    return estimate, math.sqrt(float(residuals @ residuals) / (INTERVALS - 2) / float(centred @ centred))


class Watch(Callback):
    """Records memory, live tensors, losses and hashes during a fit of `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.every, self.begin, self.hash_every = max(1, steps // 100), steps // 10, max(1, steps // 10)
        self.memory: list[float] = []
        self.tensors: list[int] = []
        self.hashes: list[str] = []
        self.not_finite, self.last_loss = 0, math.nan

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        """Record the state after a step."""
        step, loss = trainer.global_step, float(outputs["loss"])
        self.last_loss, self.not_finite = loss, self.not_finite + (not math.isfinite(loss))
        if step in (self.begin, trainer.max_steps):
            gc.unfreeze()
            gc.collect()
            self.tensors.append(sum(isinstance(item, Tensor) for item in gc.get_objects()))
            gc.freeze()  # later collections skip the objects that exist now
        if step > self.begin and step % self.every == 0:
            self.memory.append(resident_bytes())
        if step % self.hash_every == 0:
            self.hashes.append(hash_of(trainer))


def resident_bytes() -> float:
    """Resident memory of this process (Linux), after garbage collection and the return of free pages by glibc."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: None)(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096.0 * pages


def hash_of(trainer: Trainer) -> str:
    """Hash all weights and buffers of the module and all tensors of the optimizer's state, in order."""
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
    """Train one callback in this process, and return the records."""
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
    keys = ("memory", "tensors", "hashes", "not_finite", "last_loss", "every")
    return {**{key: getattr(watch, key) for key in keys}, "seconds": time.monotonic() - begun}


def soak_in_processes(name: str, ranks: int, steps: int, folder: Path) -> Row:
    """Train one callback in new processes, and return a row of the table."""
    processes = start(soak, ranks, folder, name, ranks, steps)
    codes = finish(processes, 60 + steps)
    if any(codes):
        raise RuntimeError(
            f"{name} on {ranks} rank(s) ended with {codes}:\n{(folder / 'rank0.log').read_text('utf-8')}"
        )
    records = results(ranks, folder)
    first = records[0]
    growth, error = slope(first["memory"], first["every"])
    return {
        "callback": name,
        "ranks": ranks,
        "steps": steps,
        "bytes_per_step": growth,
        "standard_error": error,
        "resident_mib": first["memory"][-1] / 2**20,
        "more_tensors": first["tensors"][1] - first["tensors"][0],
        "hash": first["hashes"][-1],
        "ranks_agree": all(other["hashes"] == first["hashes"] for other in records),
        "not_finite": sum(other["not_finite"] for other in records),
        "last_loss": first["last_loss"],
        "seconds": first["seconds"],
        "commit": provenance()["commit"],  # rows of a file can come from different commits
    }


HEADER = (
    f"{'callback':17}{'ranks':>6}{'steps':>7}{'bytes per step':>20}{'new tensors':>13}{'loss':>9}  {'hash':18}ranks"
)


def in_words(row: Row) -> str:
    """Format a row of the table."""
    growth = f"{row['bytes_per_step']:.1f} ± {row['standard_error']:.1f}"
    loss = f"{row['last_loss']:.4f}" if not row["not_finite"] else f"{row['not_finite']} BAD"
    agree = "alone" if row["ranks"] == 1 else "the same" if row["ranks_agree"] else "DIFFERENT"
    return (
        f"{row['callback']:17}{row['ranks']:6}{row['steps']:7}{growth:>20}{row['more_tensors']:13}{loss:>9}  "
        f"{row['hash']:18}{agree}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write JSON after every row if requested, and skip rows that the file already has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--callbacks", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--two-ranks", nargs="*", default=["VOGN", "NoisyKFAC"], choices=NAMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.steps < 200:
        parser.error("--steps must be at least 200, to estimate a slope")
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
            save_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
