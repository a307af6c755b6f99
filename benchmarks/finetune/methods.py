"""The methods: each adapts pretrained weights to a few images and returns a function that predicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from benchmarks.finetune.data import Images
from benchmarks.finetune.training import Weights, finetune
from lightning_bayes import NoisyKFACCallback, VariationalCallback, VOGNCallback, mc_predict
from lightning_bayes.optim.steps.base_optimizer import PRIOR_PRECISION

EVAL_SAMPLES: Final = 32
PEER: Final = "laplace"
Predict = Callable[[Tensor], Tensor]  # normalised images to probabilities, [N, 10]
Method = Callable[[Weights, Images, int, int], Predict]  # weights, images, seed, epochs

HEAD: Final = r"^model\.fc3\."  # the last layer of LeNet-5 in a task


def adam(weights: Weights, images: Images, seed: int, epochs: int) -> Predict:
    """Adam, the point estimate."""
    task = finetune(weights, images, seed, epochs, None)
    return _in_parts(lambda x: task(x).softmax(-1))


def variational(
    callback: type[VariationalCallback],
    weights: Weights,
    images: Images,
    seed: int,
    epochs: int,
    **arguments: Any,
) -> Predict:
    """The same Adam with a callback of this package."""
    variational_callback = callback(seed=seed, **arguments)
    task = finetune(weights, images, seed, epochs, variational_callback)
    assert variational_callback.optimizer is not None
    posterior = variational_callback.optimizer.posterior()
    return _in_parts(lambda x: mc_predict(task, posterior, x, EVAL_SAMPLES).probs)


def laplace(weights: Weights, images: Images, seed: int, epochs: int) -> Predict:
    """Adam, then laplace-torch's last-layer Laplace with its defaults: Kronecker factors, probit, prior by evidence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        task = finetune(weights, images, seed, epochs, None)
        posterior = Laplace(task.model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        posterior.fit(DataLoader(TensorDataset(*images), batch_size=100))
        posterior.optimize_prior_precision(method="marglik")
    return _in_parts(posterior)


def posthoc(weights: Weights, images: Images, seed: int, epochs: int, **arguments: Any) -> Predict:
    """Adam, then Laplace of this package with its defaults: Kronecker factors, probit, prior by evidence."""
    task = finetune(weights, images, seed, epochs, None)
    loader = DataLoader(TensorDataset(*images), batch_size=100)
    approximation = lightning_bayes.laplace(task, loader, require_trained=False, **arguments)
    return _in_parts(lambda x: mc_predict(task, approximation.posterior, x, linearized="closed_form").probs)


# An explicit prior also acts on the mean; the default one only on the width of the posterior.
_vogn: Final = partial(variational, VOGNCallback, prior_precision=PRIOR_PRECISION)

METHODS: Final[dict[str, tuple[str, Method]]] = {
    "adam": ("Adam", adam),
    "vogn_zero": ("VOGN, prior at zero", partial(_vogn, prior_mean="zero")),
    "vogn_initial": ("VOGN, prior at the pretrained weights", partial(_vogn, prior_mean="initial")),
    "vogn_head": ("VOGN, last layer only", partial(_vogn, bayesian=HEAD)),
    "noisy_kfac": (
        "Noisy K-FAC, prior at the pretrained weights",
        partial(variational, NoisyKFACCallback, prior_mean="initial"),
    ),
    "laplace_head": ("Laplace, last layer", posthoc),
    "laplace_head_full": ("Laplace, last layer, full", partial(posthoc, structure="full")),
    "laplace_all": ("Laplace, all layers", partial(posthoc, subset="all")),
    PEER: ("laplace-torch, last layer", laplace),
}


def _in_parts(predict: Predict) -> Predict:
    @torch.no_grad()
    def whole(x: Tensor) -> Tensor:
        return torch.cat([predict(part) for part in x.split(1000)])

    return whole
