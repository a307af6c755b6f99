"""A character model of *War and Peace*, Khan et al. 2018, Appendix M and Figure 8.

    python -m benchmarks.papers.war_and_peace --path war_and_peace.txt --epochs 200 --work FOLDER --json FILE
        [--methods adam vadam] [--seeds 3] [--minutes 9] [--accelerator gpu]

An LSTM with two layers of 128 units reads chunks of 50 characters, after 10 more that it does not predict, in batches of 50;
gradients are clipped at ±5. 80 % of the text is for training, 10 % for validation and 10 % for the test. Learning rates fall
to a tenth every 40 epochs (VadaGrad, Adam) or 80 (SGD, AdaGrad), as in the paper's Table 4. The paper claims that VadaGrad
equals SGD and that both end below AdaGrad and Adam; it states neither batch, split nor N. SGD overtakes Adam near epoch 64
(DeepOBS), so the order after a few epochs says nothing about the claim.

JSON is written after each epoch; a run goes on from its checkpoint in the work folder. An epoch takes about 100 s of a core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.over_seeds import mean_and_error
from benchmarks.provenance import save_json, saved_rows
from benchmarks.quiet import quiet
from benchmarks.resuming import Kept, Unfinished, fit
from lightning_bayes import IVONCallback, VadaGradCallback, VadamCallback

CHUNK, CONTEXT, BATCH = 50, 10, 50
START: Final = 1e-4  # s₁ of VadaGrad
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A row of the table; `callback` is called with the number of training characters."""

    title: str
    optimizer: Callable[[Any], Optimizer]
    decay_every: int
    callback: Callable[[int], Callback] | None = None


def _adam(params: Any) -> Optimizer:
    return Adam(params, lr=2.5e-3)  # as in DeepOBS


def _sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.5)


def _vadagrad(characters: int) -> Callback:
    noise = {"prior_precision": 1e-8, "init_precision": START * characters}
    return VadaGradCallback(lr=0.0075, betas=(0.0, 0.5), data_augmentation_factor=CHUNK, eval_samples=4, **noise)


METHODS: Final = {
    "adam": Method("Adam, 2.5e-3", _adam, 40),
    "vadam": Method("Vadam callback, Adam 2.5e-3", _adam, 40, lambda _: VadamCallback(eval_samples=4)),
    "ivon": Method("IVON callback, Adam 2.5e-3", _adam, 40, lambda _: IVONCallback(eval_samples=4)),
    "adam_as_printed": Method("Adam, 1.2e-3", lambda params: Adam(params, lr=1.2e-3), 40),
    "adagrad": Method("AdaGrad", lambda params: Adagrad(params, lr=0.025 / 0.5**0.5), 80),
    "sgd": Method("SGD", _sgd, 80),
    "vadagrad": Method("VadaGrad as printed", _sgd, 40, _vadagrad),
}


@final
class CharacterModel(LightningModule):
    """Predicts each character of a chunk from those before it; tests log the NLL in nats per character."""

    def __init__(self, characters: int, hidden: int, method: Method) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, hidden, 2, batch_first=True)
        self.output = nn.Linear(hidden, characters)
        self.method = method

    def forward(self, window: Tensor) -> Tensor:
        """Logits ``[batch, characters, CHUNK]`` for characters ``[batch, CONTEXT + CHUNK]``."""
        hidden, _ = self.lstm(self.embedding(window))
        logits: Tensor = self.output(hidden[:, CONTEXT:])
        return logits.transpose(1, 2)

    def nll(self, batch: list[Tensor]) -> Tensor:
        """Mean over characters."""
        (window,) = batch
        return F.cross_entropy(self(window[:, :-1]), window[:, CONTEXT + 1 :])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return self.nll(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the NLL."""
        self.log("val/nats", self.nll(batch), batch_size=len(batch[0]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the NLL."""
        self.log("test/nats", self.nll(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """The method's optimizer and the paper's schedule."""
        optimizer = self.method.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, self.method.decay_every, 0.1)}


def windows(text: Tensor) -> TensorDataset:
    """Chunks of a part, each with its context and its first target before it: rows overlap by CONTEXT + 1."""
    return TensorDataset(text.unfold(0, CONTEXT + 1 + CHUNK, CHUNK))


def load(path: Path, limit: int | None) -> tuple[list[TensorDataset], int]:
    """Training, validation and test chunks of the text, and the size of its alphabet."""
    text = path.read_text("utf-8")[:limit]
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([ids[character] for character in text])
    return [windows(part) for part in codes.tensor_split([int(0.8 * len(codes)), int(0.9 * len(codes))])], len(ids)


class Curve(Callback):
    """Passes the validation NLL of each epoch on."""

    def __init__(self, row: Row, save: Callable[[], None]) -> None:
        self.row, self.save = row, save

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch, unless a resumed run measures it again."""
        if not trainer.sanity_checking:
            del self.row["curve"][trainer.current_epoch :]
            self.row["curve"].append(float(trainer.callback_metrics["val/nats"]))
            self.save()


def run(row: Row, options: argparse.Namespace, save: Callable[[], None], deadline: float | None) -> None:
    """Train, or go on training, and test; the row gets the validation curve and the test NLL."""
    seed_everything(row["seed"], verbose=False)
    method, (parts, characters) = METHODS[row["method"]], load(options.path, options.limit)
    train, validation, test = (DataLoader(part, BATCH, shuffle=part is parts[0]) for part in parts)
    module = CharacterModel(characters, options.hidden, method)
    beside = None if method.callback is None else method.callback(CHUNK * len(parts[0]))
    kept = Kept(options.work / f"{row['method']}-{row['seed']}.ckpt", row["seed"], deadline, every=1)
    clipped = {"gradient_clip_val": 5.0, "gradient_clip_algorithm": "value", "num_sanity_val_steps": 0}
    with quiet():
        shared = {"accelerator": options.accelerator, "validation": validation, **clipped}
        trainer = fit(module, train, kept, [Curve(row, save), beside], options.epochs, **shared)
        (result,) = trainer.test(module, test, verbose=False)
    row |= {"nats": result["test/nats"], "seconds": kept.seconds}


def table(rows: list[Row]) -> str:
    """Format a Markdown table: means over seeds, of the test after the last epoch and of validation so far."""
    lines = ["| method | seeds | epochs | validation nats | test nats |", "| --- | ---: | ---: | ---: | ---: |"]
    for method in METHODS:
        group = [row for row in rows if row["method"] == method and row["curve"]]
        if group:
            epochs, last = (statistics.fmean(map(measure, group)) for measure in (_epochs, _last))
            nats = [row["nats"] for row in group if "nats" in row]
            test = mean_and_error(nats) if nats else "not finished"
            lines.append(f"| {METHODS[method].title} | {len(group)} | {epochs:.0f} | {last:.3f} | {test} |")
    return "\n".join(lines)


def _epochs(row: Row) -> int:
    return len(row["curve"])


def _last(row: Row) -> float:
    return float(row["curve"][-1])


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="text file in UTF-8")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--limit", type=int, help="number of characters to use (default: all)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--minutes", type=float, help="stop after the epoch in which they are over")
    parser.add_argument("--json", type=Path, help="written after each epoch; finished runs are skipped")
    options = parser.parse_args(arguments)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    setting = {name: getattr(options, name) for name in ("epochs", "limit", "hidden")}
    rows: list[Row] = saved_rows(options.json)
    for seed, method in product(range(options.seeds), options.methods):
        key = {"method": method, "seed": seed, **setting}
        row = next((row for row in rows if key.items() <= row.items()), None)
        if row is None:
            rows.append(row := {**key, "curve": []})
        if "nats" in row:
            continue
        try:
            run(row, options, lambda: save_json(options.json, {"results": rows}), deadline)
            save_json(options.json, {"results": rows})
        except Unfinished as stopped:
            print(f"{method}, seed {seed}: {stopped}; run the command again")
            break
    print(table(rows))


if __name__ == "__main__":
    main()
