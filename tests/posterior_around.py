"""A mean-field posterior around a model's own weights, and a loop over the samples of a posterior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.posteriors import AbstractPosterior, MeanField
from lightning_bayes.predictive import PosteriorSamples


def mean_field_around(
    model: nn.Module, precision: float = 9.0, constants: dict[str, Tensor] | None = None
) -> MeanField:
    """The same precision for every weight; `constants` take the place of the model's buffers."""
    mean = {name: param.detach().clone() for name, param in model.named_parameters()}
    precisions = {name: torch.full_like(value, precision) for name, value in mean.items()}
    others = {name: value.clone() for name, value in model.state_dict().items() if name not in mean}
    return MeanField(mean, precisions, dict.fromkeys(mean, 1.0), 10, others | (constants or {}))


@torch.no_grad()
def outputs_of_samples(model: nn.Module, posterior: AbstractPosterior, x: Any, count: int, seed: int = 0) -> list[Any]:
    """What a model in evaluation mode returns for inputs under each sample, one after the other."""
    samples = PosteriorSamples(posterior, count, seed)
    model.eval()
    return [torch.func.functional_call(model, samples.tensors(k), (x,)) for k in range(count)]
