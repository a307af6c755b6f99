"""The bound of the noise where nobody has chosen one, set once the loss and the layers are known."""

from __future__ import annotations

from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.steps.base_optimizer import CAUTIOUS_NOISE, noise_of_depth, noisy_layers
from lightning_bayes.predictive import Link


class DefaultNoise:
    """κ of an optimizer's groups, from what is predicted, from what moves the mean, and from the number of noisy layers.

    Args:
        bounds: κ of classifiers and of others, for networks that are not deep.
    """

    def __init__(self, bounds: tuple[float, float]) -> None:
        self.bounds = bounds
        self._seen: tuple[MeanFieldOptimizer, int] | None = None

    def apply(self, optimizer: MeanFieldOptimizer, link: Link | None) -> None:
        """Set κ before the first update, and again where layers were thawed or frozen since.

        Args:
            optimizer: Whose groups.
            link: How outputs become predictions.
        """
        layers = noisy_layers(optimizer.param_groups, optimizer.state)
        if self._seen == (optimizer, layers):
            return
        self._seen, step = (optimizer, layers), optimizer.base_step
        bounds = CAUTIOUS_NOISE if step is not None and step.follows_gradients else self.bounds
        share = noise_of_depth(bounds[0 if link in {"softmax", "sigmoid"} else 1], layers)
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["relative_noise"] = share
