"""One run: training with its validation curve, and the test."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.papers.war_and_peace.methods import METHODS
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import VariationalCallback
from lightning_bayes.zoo import BayesLanguageModel, CharRNN, Generated, TextDataModule, generate

PROMPT = "Prince Andrew looked at her and "
GRADIENT_BOUND = 5.0  # torch-rnn clips every gradient at ±5


@dataclass(frozen=True)
class Setting:
    """Settings shared by all methods."""

    path: str
    epochs: int = 3
    limit: int | None = None
    hidden: int = 128
    samples: int = 4
    context: int = 10
    checks: int = 4
    val_batches: int = 40
    written: int = 300


class Curve(Callback):
    """Records the validation NLL."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record one point."""
        if not trainer.sanity_checking:
            self.points.append((trainer.global_step, float(trainer.callback_metrics["val/cls/NLL"])))


def run(method: str, seed: int, setting: Setting) -> tuple[dict[str, Any], Generated | None]:
    """Train and test."""
    pl.seed_everything(seed, verbose=False)
    specification, start = METHODS[method], time.perf_counter()
    data = TextDataModule(setting.path, context=setting.context, limit=setting.limit)
    data.setup("fit")
    characters, vocabulary = len(data.train_set.text), len(data.alphabet)
    task = BayesLanguageModel(
        CharRNN(vocabulary, hidden=setting.hidden, context=setting.context), vocabulary, specification.optimizer
    )
    curve = Curve()
    callback = None if specification.callback is None else specification.callback(characters, setting.samples)
    with quiet():
        trainer = quiet_trainer(
            [curve, callback],
            setting.epochs,
            val_check_interval=1 / setting.checks,
            limit_val_batches=setting.val_batches,
            num_sanity_val_steps=0,
            gradient_clip_val=GRADIENT_BOUND,
            gradient_clip_algorithm="value",
        )
        trainer.fit(task, data)
        (result,) = trainer.test(task, data, verbose=False)
    row = {
        "method": method,
        "seed": seed,
        "characters": characters,
        "seconds": time.perf_counter() - start,
        "curve": curve.points,
        "nats": result["test/cls/NLL"],
        "nats_at_mean": result.get("test_mean/cls/NLL", result["test/cls/NLL"]),
        "bits": result["test/lm/bits"],
        "perplexity": result["test/lm/perplexity"],
        "ece": result["test/cal/ECE"],
    }
    return row, None if callback is None else _written(task, data, callback, setting.written)


def _written(
    task: BayesLanguageModel, data: TextDataModule, callback: VariationalCallback, length: int
) -> Generated | None:
    assert callback.optimizer is not None
    if set(PROMPT) - set(data.alphabet.characters):
        return None
    posterior = callback.optimizer.posterior().select("model.")
    with torch.no_grad():
        return generate(task.model, posterior, data.alphabet, PROMPT, length, window=60, samples=8)
