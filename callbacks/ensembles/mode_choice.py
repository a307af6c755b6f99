"""How many of the last modes to average over: as many as minimise the validation NLL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.callbacks.trainer.loaders import ValidationSet, random_state_kept, sum_over_processes
from lightning_bayes.errors import BayesError
from lightning_bayes.predictive import Link, MemberSamples, evaluation_mode, predictive_nll
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.predictive.samples import require_tensor


def nll_of_last(
    outputs: Tensor, targets: Tensor, link: Link, reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> list[float]:
    """The NLL of averages over the last 1, …, M networks, from their outputs ``[M, N, …]``."""
    return [predictive_nll(outputs[-count:], targets, link, None, reduce) for count in range(1, len(outputs) + 1)]


def best_count(nlls: list[float]) -> int:
    """The number of networks with the smallest NLL; all if some NLL is not a number."""
    return len(nlls) if any(map(math.isnan, nlls)) else 1 + nlls.index(min(nlls))


@final
class ModeChoice:
    """Chooses at the end of a fit with a validation set; without one, all modes are averaged."""

    def __init__(self) -> None:
        self._validation = ValidationSet("MultiModeCallback", "number of modes", "num_modes=")

    def keep(self, trainer: Trainer) -> None:
        """Keep the loaders of the current validation."""
        self._validation.keep(trainer)

    def choose(self, trainer: Trainer, module: LightningModule, samples: MemberSamples, link: Link) -> int | None:
        """The number of last modes to average over, logged; None if the validation data do not decide."""
        loader = self._validation.find(trainer)
        if loader is None:
            return None

        def forward(inputs: Any) -> Tensor:
            return require_tensor(module, samples.outputs(module, Repeatable(module, inputs)))

        try:
            with evaluation_mode(module), random_state_kept(module), torch.no_grad():
                found = self._validation.outputs(trainer, module, forward, loader)
            nlls = nll_of_last(found.outputs, found.targets, link, sum_over_processes(trainer, module))
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
