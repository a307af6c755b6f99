"""The posteriors trained with Lightning, each with the code that a user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gap_regression.data import NOISE_STD, Band, Points
from benchmarks.quiet import quiet_trainer
from lightning_bayes import LaplaceCallback, NoisyKFACCallback, PosteriorScale, VOGNCallback
from lightning_bayes.curvature import Gaussian
from lightning_bayes.zoo import BayesRegressor

HIDDEN, PRIOR_PRECISION, BATCH, SAMPLES = 50, 1.0, 20, 200


class Method(NamedTuple):
    """A method with its callbacks.

    Attributes:
        title: Title of the panel.
        lines: The user's code, without the intervals and `eval_samples` of the figure.
        build: Function that builds the callbacks.
        lr: Learning rate of the user's Adam.
    """

    title: str
    lines: str
    build: Callable[[], list[Callback]]
    lr: float = 5e-3


METHODS = (
    Method("default", "VOGNCallback()", lambda: [VOGNCallback(eval_samples=SAMPLES)]),
    Method(
        "default, width from validation data",
        "VOGNCallback(), PosteriorScale(linearized=True)",
        lambda: [VOGNCallback(eval_samples=SAMPLES), PosteriorScale(linearized=True)],
    ),
    Method(
        "Noisy K-FAC, natural step",
        f"NoisyKFACCallback(lr=0.01, prior_precision={PRIOR_PRECISION:g})",
        lambda: [
            NoisyKFACCallback(
                lr=0.01,
                prior_precision=PRIOR_PRECISION,
                eval_samples=SAMPLES,
                stats_interval=1,
                inverse_interval=10,
            )
        ],
    ),
    Method(
        "Adam, then Laplace of all weights",
        f'LaplaceCallback("full", "all", prior_precision={PRIOR_PRECISION:g})',
        lambda: [
            LaplaceCallback(
                "full", "all", prior_precision=PRIOR_PRECISION, eval_samples=SAMPLES, likelihood=Gaussian(NOISE_STD)
            )
        ],
    ),
)


def train(method: Method, points: Points, validation: Points, inputs: Tensor, epochs: int, seed: int) -> Band:
    """Train a method and predict.

    Args:
        method: The method.
        points: Training data.
        validation: Validation data.
        inputs: Inputs of the predictions, ``[m, 1]``.
        epochs: Passes over the training data.
        seed: Seed of the network and of the batch order.

    Returns:
        Mean and epistemic standard deviation at the inputs.
    """
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    module = BayesRegressor(network, lambda params: torch.optim.Adam(params, lr=method.lr), noise_std=NOISE_STD)
    callbacks = method.build()
    trainer = quiet_trainer(callbacks, epochs, check_val_every_n_epoch=epochs)
    loaders = [
        DataLoader(TensorDataset(*part), batch_size=BATCH, shuffle=shuffle)
        for part, shuffle in ((points, True), (validation, False))
    ]
    trainer.fit(module, *loaders)
    predictions = trainer.predict(module, DataLoader(TensorDataset(inputs), batch_size=512)) or []
    mean, variance = (torch.cat([batch[key] for batch in predictions]).flatten() for key in ("mean", "variance"))
    scales = [callback.scale for callback in callbacks if isinstance(callback, PosteriorScale)]
    return Band(mean.tolist(), variance.sqrt().tolist(), scales[0] if scales else None)
