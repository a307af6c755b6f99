"""How many of the last modes to average over: as many as minimise the validation NLL."""

from __future__ import annotations

import math
from typing import final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.callbacks.trainer.batch_reader import BatchReader
from lightning_bayes.callbacks.trainer.loaders import OnDevice, ValidationSet, random_state_kept, sum_over_processes
from lightning_bayes.errors import BayesError
from lightning_bayes.likelihood import LinkArgument
from lightning_bayes.likelihood.scoring import Reduce
from lightning_bayes.predictive import MemberSamples, evaluation_mode, predictive_nll
from lightning_bayes.predictive.known_outputs import the_output
from lightning_bayes.predictive.labelled import LabelledBatches


def nll_of_last(
    outputs: Tensor,
    targets: Tensor,
    likelihood: LinkArgument,
    reduce: Reduce = lambda total: total,
    counted: Tensor | None = None,
) -> list[float]:
    """The NLL of averages over the last 1, …, M networks, from their outputs ``[M, N, …]``."""
    counts = range(1, len(outputs) + 1)
    return [predictive_nll(outputs[-count:], targets, likelihood, reduce, counted) for count in counts]


def best_count(nlls: list[float]) -> int:
    """The number of networks with the smallest NLL; all if some NLL is not a number."""
    return len(nlls) if any(map(math.isnan, nlls)) else 1 + nlls.index(min(nlls))


@final
class ModeChoice:
    """Chooses at the end of a fit with a validation set; without one, all modes are averaged."""

    def __init__(self) -> None:
        self._validation = ValidationSet("MultiModeCallback", "number of modes")

    def keep(self, trainer: Trainer) -> None:
        """Keep the loaders of the current validation."""
        self._validation.keep(trainer)

    def choose(
        self, trainer: Trainer, module: LightningModule, samples: MemberSamples, reader: BatchReader
    ) -> int | None:
        """The number of last modes to average over, logged; None if the validation data do not decide."""
        loader = self._validation.find(trainer)
        if loader is None:
            return None
        try:
            with evaluation_mode(module), random_state_kept(module), torch.no_grad():
                labels = [reader.labels(batch) for batch in OnDevice(trainer, loader, RunningStage.VALIDATING)]
                labelled = LabelledBatches(module, reader.likelihood, labels)
                with trainer.precision_plugin.forward_context():
                    outputs = labelled.outputs(samples)
            kind, reduce = the_output(reader.likelihood).kind, sum_over_processes(trainer, module)
            nlls = nll_of_last(outputs, labelled.targets, kind, reduce, labelled.counted)
        except BayesError as error:
            rank_zero_info(f"MultiModeCallback averages over all modes: {error}")
            return None
        count = best_count(nlls)
        advice = (
            " The earlier ones underfit: train longer, or leave the callback out." if count == 1 < len(nlls) else ""
        )
        numbers = ", ".join(f"{nll:.4f}" for nll in nlls)
        rank_zero_info(
            f"MultiModeCallback: averages over the last {count} of {len(nlls)} modes. Averages over the last 1 to "
            f"{len(nlls)} have a validation NLL of {numbers} nats.{advice}"
        )
        return count
