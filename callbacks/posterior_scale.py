"""Chooses the width of a trained posterior on the validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, final

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bayes.callbacks.chosen_posterior import ChosenPosterior, OutputsAt, Reduce
from lightning_bayes.predictive import Link, fit_scale, predictive_nll
from lightning_bayes.predictive.scale import LARGEST


@final
class PosteriorScale(ChosenPosterior):
    """Chooses the width c ≥ 0 of the posterior, Σ → c² Σ, that minimises the NLL of the validation set.

    Use it together with a callback that has a posterior, such as `VOGNCallback`. The width is chosen at the end of a fit,
    logged as ``val/posterior_scale`` and saved in the checkpoint. Tests, validations and predictions outside of a fit use
    it. For a checkpoint without a width, the callback chooses one first. At c = 0, predictions use the posterior mean. See
    `lightning_bayes.predictive.fit_scale` for the search.

    The module is called on the inputs of batches ``(inputs, targets)``. The likelihood follows from the link of the
    evaluation. With the identity link, the noise comes from the module's ``lightning_bayes_likelihood``, if it is a
    `lightning_bayes.curvature.Gaussian`; otherwise σ is chosen together with the width.

    With linearised samples, the validation set is evaluated twice, for any number of widths. Otherwise, also with the closed
    form, each width costs an evaluation, about 25 in total. The outputs of an evaluation are held in memory,
    ``[samples, examples, outputs]``.

    Args:
        linearized: Whether predictions are linearised, see `LinearizedSamples`; None follows the callback with the
            posterior.
        refit: Whether to choose again before each evaluation even if the checkpoint has a width, such as for another number
            of samples.
    """

    function = "lightning_bayes.predictive.fit_scale"

    def batches(self, trainer: Trainer, loader: Any, limit: int | None, count: int) -> Callable[[], Iterable[Any]]:
        """All validation batches, loaded again for each width."""
        return partial(islice, loader, limit)

    def find(self, outputs_at: OutputsAt, link: Link, noise_std: float | None, reduce: Reduce) -> tuple[float, float]:
        """The width with the lowest NLL; the temperature stays 1."""

        def nll(scale: float) -> float:
            found = outputs_at(scale)
            return predictive_nll(found.outputs, found.targets, link, noise_std, reduce)

        fitted = fit_scale(nll)
        rank_zero_info(
            f"PosteriorScale: the width {fitted.scale:.3g} of the posterior minimises the validation NLL, "
            f"{fitted.nll:.4f} nats (posterior mean: {fitted.nll_of_mean:.4f})."
        )
        if fitted.scale > LARGEST / 1.01:
            rank_zero_warn(
                f"The width {fitted.scale:.3g} is the end of the search range: the posterior is far too narrow, or the "
                "validation set does not determine its width."
            )
        return fitted.scale, 1.0
