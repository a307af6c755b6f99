"""Scalar regression with Gaussian noise.

    loss = -mean_i E log N(y_i | f(x_i, θ), 1/τ) = mean_i ½ (E[τ] (y_i - f(x_i, θ))² - E[log τ] + log 2π)

E[τ] stays in the loss, because a posterior is correct only if the loss equals the negative log-likelihood; a proportional
loss is not enough. See `noise` for the precision τ and the predictive density of the test log-likelihood.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, ClassVar, final

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.distributions import Distribution

from lightning_bayes.errors import ShapeError, UnknownNumDataError
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.likelihood.mixtures import observed
from lightning_bayes.metrics import observed_metrics, sampled_regression_metrics
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch
from lightning_bayes.zoo.tasks.noise import PUBLISHED_PRIOR, NoiseName, make_noise


@final
class BayesRegressor(SupervisedTask):
    """An ordinary scalar regressor. Any callback of this package makes it Bayesian.

    Batches are inputs and targets ``[batch]`` or ``[batch, 1]``. The task logs ``train/loss`` and ``val/loss`` in the units
    of the network, ``{val,test}/reg/{RMSE,NLL}`` and ``test/reg/{coverage,width}`` of 90 % intervals in those of the
    data: if the data module has ``target_mean`` and ``target_std``, targets are assumed to be standardised with them. The
    NLL of an example uses the predictive density averaged over posterior samples (log-mean-exp, not a Gaussian with matched
    moments). A point estimate has one sample.

    Args:
        model: Network from inputs to means, ``[batch, 1]`` or ``[batch]``.
        optimizer: Called with the network's parameters. The default is Adam with its default learning rate of 1e-3.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate constant.
        noise_std: Standard deviation σ of the noise in the units of the network's targets; the initial value if the noise is
            learned. For standardised targets, 1 is the noise of a constant prediction.
        noise: ``"fixed"`` keeps σ; ``"learned"`` uses its maximum-likelihood estimate; ``"gamma"`` gives the precision 1/σ²
            a Gamma prior and posterior (Zhang et al. 2018, appendix C.1).
        noise_prior: Shape and rate of the Gamma prior.

    Raises:
        HyperparameterError: If ``noise_std``, ``noise`` or ``noise_prior`` is out of range.
    """

    lightning_bayes_link: ClassVar[str] = "identity"  # how callbacks turn outputs into predictions

    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        noise_std: float = 1.0,
        noise: NoiseName = "fixed",
        noise_prior: tuple[float, float] = PUBLISHED_PRIOR,
    ) -> None:
        noise_model = make_noise(noise, noise_std, noise_prior)
        val_metrics = sampled_regression_metrics(prefix="val/")
        test_metrics = observed_metrics(prefix="test/")
        super().__init__(model, optimizer, lr_scheduler, val_metrics, test_metrics)
        self.noise = noise_model
        self.register_buffer("target_mean", torch.tensor(0.0))
        self.register_buffer("target_std", torch.tensor(1.0))

    @property
    def lightning_bayes_likelihood(self) -> Gaussian:
        """The distribution of sampled labels, at the current expected precision."""
        return Gaussian(float(self.noise.moments()[0]) ** -0.5)

    def lightning_bayes_observation(self, output: Tensor) -> Distribution:
        """The distribution of the targets given an output, in the units of the network."""
        return self.noise.distribution(output)

    def setup(self, stage: str) -> None:
        """Read the mean and standard deviation of the targets from the data module."""
        datamodule = getattr(self.trainer, "datamodule", None)
        for name in ("target_mean", "target_std"):
            value = getattr(datamodule, name, None)
            if value is not None:
                getattr(self, name).fill_(float(value))

    def on_train_start(self) -> None:
        """Set the noise's number of training examples; raises UnknownNumDataError if learned noise cannot have one."""
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        if isinstance(dataset, Sized):
            self.noise.count(len(dataset))
        elif hasattr(self.noise, "num_data"):
            raise UnknownNumDataError(
                f"Learned noise averages over an epoch, but {type(dataset).__name__} has no length. Define its __len__, or "
                "use noise='fixed'."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean negative log-likelihood of the batch, a scalar in nats."""
        inputs, targets = split_batch(batch)
        mean, targets = self._columns(self(inputs), targets, len(inputs))
        loss = self.noise.expected_nll(mean, targets)
        self.noise.observe(targets - mean)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update the validation metrics."""
        samples, targets = self._samples(batch)
        loss = self.noise.expected_nll(samples.mean(0), targets)
        self.log("val/loss", loss, prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(**self._scores(samples, targets))

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        """Update the test metrics. Returns both predictions under a posterior, for callbacks that compare them."""
        samples, targets = self._samples(batch)
        scores, scale = self._scores(samples, targets), self.target_std.to(samples.dtype)
        found = observed(self.noise.distribution(samples.flatten()), len(samples))
        self.test_metrics.update(**scores, lower=found.lower * scale, upper=found.upper * scale)
        return None if self.mean_forward is None else self._both(samples, self.mean_forward(batch[0]), batch[1], scores)

    def _both(self, samples: Tensor, mean: Tensor, labels: Any, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """The prediction of the samples and at the posterior mean, in the units of the data."""
        at_mean = self._scores(*(column[None] for column in self._columns(mean, labels, len(labels))))
        return {
            "outputs": samples * self.target_std.to(samples.dtype),
            "mean_outputs": at_mean["mean"],
            "targets": scores["target"],
            "log_densities": scores["log_densities"],
            "mean_log_densities": at_mean["log_densities"][0],
        }

    def _samples(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Means under each posterior sample, ``[samples, batch]``, and targets, ``[batch]``."""
        inputs, targets = split_batch(batch)
        columns = [self._columns(outputs, targets, len(inputs)) for outputs in self.sampled_forward(inputs)]
        return torch.stack([mean for mean, _ in columns]), columns[0][1]

    def _scores(self, samples: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Arguments of the metrics, in the units of the data."""
        scale = self.target_std.to(samples.dtype)
        return {
            "mean": samples.mean(0) * scale,
            "variance": samples.var(0, correction=0) * scale**2,
            "target": targets * scale,  # residuals and densities do not depend on target_mean
            "log_densities": self.noise.log_density(samples, targets) - scale.log(),
        }

    def _columns(self, mean: Tensor, targets: Tensor, num_examples: int) -> tuple[Tensor, Tensor]:
        self._check_column("The output of " + type(self.model).__name__, mean, num_examples)
        self._check_column("The target", targets, num_examples)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32)).flatten()
        return mean, targets.to(mean.dtype).flatten()

    @staticmethod
    def _check_column(name: str, values: Tensor, num_examples: int) -> None:
        # [batch, 1] - [batch] would broadcast to [batch, batch] and train on nonsense.
        if values.shape not in {(num_examples,), (num_examples, 1)}:
            raise ShapeError(
                f"{name} has shape {list(values.shape)}, but scalar regression of {num_examples} inputs requires "
                f"[{num_examples}] or [{num_examples}, 1]."
            )
