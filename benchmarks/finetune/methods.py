"""The methods: the user's optimizer, a callback beside it, or a posterior around the user's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from benchmarks.defaults.mode_problems import Images
from benchmarks.defaults.modes import Logits, joined
from benchmarks.finetune.networks import DEVICE, Classifier, Network, Weights, fit
from lightning_bayes import SWAGCallback, VOGNCallback
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import PosteriorSamples, Samples, predictive_samples

SAMPLES, MEMBERS = 10, 3
Result = tuple[str, Logits, float]  # of a method: its logits, and the seconds of its fit

CALLBACKS: dict[str, Callable[[str], Any]] = {  # of the pattern of the last layer
    "vogn": lambda head: VOGNCallback(),
    "vogn@0.1": lambda head: VOGNCallback(relative_noise=0.1),
    "vogn_head": lambda head: VOGNCallback(bayesian=head),
    "swag": lambda head: SWAGCallback(),
}
LAPLACE: dict[str, dict[str, Any]] = {
    "laplace_head_full": {"structure": "full", "subset": "last_layer"},
    "laplace_head": {"structure": "kronecker", "subset": "last_layer"},
    "laplace_all": {"structure": "kronecker", "subset": "all"},
}
METHODS = ("user", *CALLBACKS, "three", *LAPLACE)


class Adaptation(NamedTuple):
    """A network to adapt."""

    network: Network
    weights: Weights
    images: Images
    seed: int
    epochs: int

    def fitted(self, seed: int, *callbacks: Callback) -> tuple[Classifier, float]:
        """The network with a new last layer, adapted, and the seconds this took."""
        seed_everything(seed, verbose=False)
        images = self.images
        module = Classifier(self.network.create(int(images.test_y.max()) + 1, self.weights), self.network.lr)
        start = time.perf_counter()
        fit(module, (images.train_x, images.train_y), (images.val_x, images.val_y), seed, self.epochs, *callbacks)
        return module, time.perf_counter() - start

    @torch.no_grad()
    def logits(self, module: Classifier, samples: Samples | None = None) -> Logits:
        """Outputs of the network, or of its samples."""

        def of(x: Tensor) -> Tensor:
            def forward() -> Tensor:
                return torch.cat([module(part.to(DEVICE)) for part in x.split(300)])  # type: ignore[no-untyped-call]

            return (forward()[None] if samples is None else samples.outputs(module, forward)).float().cpu()

        return Logits(of(self.images.val_x), of(self.images.test_x), of(self.images.ood_x))


def results(job: Adaptation, methods: list[str]) -> Iterator[Result]:
    """Each method's result, the user's first; posteriors around the user's weights share that fit."""
    module, seconds = job.fitted(job.seed)
    user = job.logits(module)
    yield "user", user, seconds
    for method in methods:
        if method in CALLBACKS:
            yield _with_callback(job, method)
        elif method == "three":
            others = [job.fitted(job.seed + 1000 * member) for member in range(1, MEMBERS)]
            yield method, joined([user, *(job.logits(m) for m, _ in others)]), seconds + sum(s for _, s in others)
        elif method in LAPLACE:
            yield _with_laplace(job, method, module, seconds)


def _with_callback(job: Adaptation, method: str) -> Result:
    callback = CALLBACKS[method](rf"^net\.{job.network.head}\.")
    module, seconds = job.fitted(job.seed, callback)
    posterior = callback.posterior if method == "swag" else callback.optimizer.posterior()
    return method, job.logits(module, _samples(posterior)), seconds


def _with_laplace(job: Adaptation, method: str, module: Classifier, seconds: float) -> Result:
    """Laplace, whose prior minimises the validation NLL, with linearised samples."""
    start, images = time.perf_counter(), job.images
    loaders = (
        DataLoader(TensorDataset(*(part.to(DEVICE) for part in parts)), 100) for parts in (images[:2], images[2:4])
    )
    fitted = partial(lightning_bayes.laplace, module, next(loaders), require_trained=False)
    posterior = fitted(prior_precision="validation", validation=next(loaders), **LAPLACE[method]).posterior
    seconds += time.perf_counter() - start
    samples = predictive_samples(_samples(posterior), True, "softmax")
    return method, job.logits(module, samples), seconds


def _samples(posterior: AbstractPosterior) -> PosteriorSamples:
    return PosteriorSamples(posterior.to(DEVICE), SAMPLES)
