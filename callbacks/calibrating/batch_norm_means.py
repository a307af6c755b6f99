"""The mean inputs of layers before BatchNorm, from the first batches of a fit's last epoch; see `ScaledPosterior`."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final, final

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.callbacks.trainer.loaders import mean_over_processes
from lightning_bayes.callbacks.trainer.training_inputs import FIRST_BATCHES, TrainingInputs
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.posteriors.scaled import InputMeans
from lightning_bayes.predictive import PosteriorSamples, Samples
from lightning_bayes.predictive.batch_norm_inputs import centred_means, input_means

_UPDATES_PER_BATCH: Final = 50  # of the fit, for each batch of training inputs that its end may run


@final
class BatchNormMeans:
    """Keeps training inputs in a fit, and afterwards their means.

    Attributes:
        means: The layers' weights and mean inputs, by the name of BatchNorm's running mean.
    """

    def __init__(self) -> None:
        self.means: InputMeans = {}
        self._seen = TrainingInputs(FIRST_BATCHES)
        self._centred = set[str]()  # the running means of BatchNorm layers in training mode

    def see(self, module: LightningModule, batch: Any, index: int) -> None:
        """Keep one of the first batches of an epoch, if some BatchNorm layer subtracts its mean."""
        if not index:
            self._centred = centred_means(module)
        if index < FIRST_BATCHES and self._centred:
            self._seen.add(batch, index)

    def clear(self) -> None:
        """Forget the inputs, and keep the means."""
        self._seen.batches, self._centred = [], set()

    def find(self, trainer: Trainer, module: LightningModule, samples: Samples) -> None:
        """Find the means at the end of a fit."""
        if isinstance(samples, PosteriorSamples) and self._centred:
            self.means = self._found(trainer, module, samples.posterior)

    def centred(self, samples: Samples, module: LightningModule) -> Samples:
        """Samples whose BatchNorm layers subtract the mean of each."""
        if not self.means or not isinstance(samples, PosteriorSamples):
            return samples
        posterior = ScaledPosterior(samples.posterior, 1.0, input_means=self.means)
        return PosteriorSamples(posterior.to(module.device), samples.count, samples.seed)

    def _found(self, trainer: Trainer, module: LightningModule, posterior: AbstractPosterior) -> InputMeans:
        """The means over processes; none if forward takes no batch."""
        try:
            most = max(1, trainer.global_step // _UPDATES_PER_BATCH)
            means = input_means(module, islice(self._seen.runs(trainer, module), most), posterior.mean)
        except Exception as error:  # of the user's network, which a fit without calibration does not call here
            if isinstance(error, Warning):  # the user asked for an error
                raise
            return {}
        reduce = mean_over_processes(trainer)
        return {name: (weight, reduce(mean)) for name, (weight, mean) in means.items() if name in self._centred}
