"""One output that represents the mixture over samples, for networks that return the mean and the variance of their targets.

    E[y] = mean_s μ_s        Var[y] = mean_s σ²_s + Var_s μ_s    (law of total variance)

The average of raw outputs would leave out Var_s μ_s, and average log-variances or deviations instead of variances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """How the second half of an output's columns states the variance; the first half is the mean."""

    read: Callable[[Tensor], Tensor]  # to the variance
    write: Callable[[Tensor], Tensor]  # from it


_FORMS: Final = (  # variance, log-variance, standard deviation, and its logarithm
    Form(lambda v: v, lambda v: v),
    Form(torch.exp, torch.log),
    Form(torch.square, torch.sqrt),
    Form(lambda v: (2 * v).exp(), lambda v: v.log() / 2),
)


def form_of(outputs: Tensor, mean: Tensor, variance: Tensor) -> Form | None:
    """The form of outputs ``[S, …, 2 k]`` whose distributions have these moments, of as many values; None for another."""
    if outputs.shape[-1] % 2 or mean.numel() * 2 != outputs.numel():
        return None
    first, second = outputs.chunk(2, -1)
    if not torch.allclose(first, mean.reshape(first.shape), rtol=1e-4, atol=1e-6):
        return None
    spread = variance.reshape(first.shape)
    return next((f for f in _FORMS if torch.allclose(f.read(second), spread, rtol=1e-3, atol=2e-6)), None)


def mixture_output(outputs: Tensor, form: Form) -> Tensor:
    """Mean and variance of the mixture over the first dimension of outputs ``[S, …, 2 k]``, in the form of one output."""
    means, second = outputs.chunk(2, -1)
    variance = form.read(second).mean(0) + means.var(0, correction=0)
    return torch.cat([means.mean(0), form.write(variance)], -1)
