"""The arguments of the callbacks: one typed source for type checkers, editors and jsonargparse.

They are those that optimizers and callbacks share (`optim.hyperparameters.HyperparameterFields`) and a few more. Defaults
and ranges come from the record of the callback's optimizer, so an algorithm states them once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lightning_bayes.curvature import check_names
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.optim import FisherName, MeanFieldOptimizer, Schedule
from lightning_bayes.optim.hyperparameters import HyperparameterFields, StepName
from lightning_bayes.optim.kronecker.factor_source import UnsupportedLayers
from lightning_bayes.optim.settings import plain
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import Link


class CallbackFields(HyperparameterFields, total=False):
    """Arguments of the callbacks.

    Attributes:
        lr: Learning rate α of the paper's natural step, at the peak of the user's schedule. None, the default step: the
            user's own optimizer updates the mean (see `optim.steps.base_optimizer`; a heuristic). Schedulers act on either.
        step: ``"user"``: the user's optimizer moves the mean. ``"natural"`` with an `lr`: the paper's step. ``"natural"``
            without: the natural gradient's direction, as long as the user's step, tensor by tensor (`optim.steps.graft`; a
            heuristic). None: the first without an `lr`, the second with one; OGN, K-FAC and Vprop-0 bound their own step.
        mc_samples: K, weight samples per batch and process in training; default 1, CVI 10.
        eval_samples: S, weight samples in validation, test and prediction; 0 evaluates at the posterior mean. Default 10.
        linearized: Whether validation, test and prediction use the model's first-order expansion around the mean,
            f(x, μ) + J (θ - μ), which stays sensible under wide posteriors; default False. See
            `lightning_bayes.predictive.LinearizedSamples`.
        val_samples: Weight samples in validation inside a fit, which costs that many forwards of each batch; 0 validates at
            the posterior mean. None: 3, or S if that is smaller or `TemperatureScaling` fits a temperature for S samples.
        prior_precision: δ of the prior N(μ₀, 1/δ). None: from the optimizer's L2 ``weight_decay`` (δ = Ñ·wd/τ), else 1 with
            an explicit `lr` and none in the default step: its prior is centred at the mean, with a precision that the
            curvature gives (`posteriors.shaped_noise`), so that the mean is unregularised.
        prior: A mean-field posterior of earlier data, or a checkpoint with one: μ₀ and δ of each weight that it names, by
            the LightningModule's names, as if training went on with all data (`optim.weight_prior`). Other weights keep
            `prior_mean` and `prior_precision`. Take a posterior of an explicit `lr`: the default step's is tempered, so
            as a prior it counts its data many times.
        data_augmentation_factor: ρ; augmentation makes N examples count as ρN. None: that of the data module, else 1.
        num_data: N, number of training examples; None counts those of the trainer's data loader.
        init_precision: Posterior precision before the first update; the default step replaces it there. None takes the
            curvature of the first batch.
        relative_noise: κ, root mean square of each tensor's noise in units of the tensor's size, which the curvature shapes
            (`posteriors.shaped_noise`); the data lower it where they allow less. None: the noise of the bound with an
            explicit `lr`. With the default step, for classifiers (known from `link` or the loss): 0.02 with normalisation
            layers, else 0.3 with convolutions and 0.05 without; for other models 0.01; less for more than five layers
            (`optim.steps.base_optimizer.noise_of_depth`). These are heuristics.
        noise_flatness: ε, how flat the noise of size κ is (`posteriors.shaped_noise`). None: 0.03, and 1 where κ is 0.3 for
            convolutions by default.
        curvature_interval: T, updates between measurements of the curvature, after ten that all measure; the others run the
            bare model. None: 10 where the user's optimizer updates the mean and the curvature is a running average
            (`optim.runtime.measuring`), else 1, as with an explicit `lr`.
        link: How outputs become predictions in evaluation. None: the module's attribute ``link``, else that of the
            training loss (``mse_loss``: ``"identity"``), else ``"softmax"``.
        bayesian: Regular expression of the names of the parameters that have a posterior; the others are trained by the
            same step, without noise. None for all, in the default step without normalisation layers, whose single numbers
            drive whole channels: noise in them cost a small ResNet most (a heuristic). ``"^head"`` is a last-layer
            posterior.
    """

    lr: float | Schedule | None
    step: StepName | None
    eval_samples: int
    linearized: bool
    val_samples: int | None
    prior_precision: float | Schedule | None
    prior: AbstractPosterior | str | os.PathLike[str] | None
    data_augmentation_factor: float | Schedule | None
    curvature_interval: int | None
    link: Link | None


class KroneckerFields(CallbackFields, total=False):
    """Arguments of the callbacks of K-FAC and Noisy K-FAC.

    Attributes:
        stats_interval: T_stats, updates between measurements of the curvature; default 10, beside the user's step 20.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns. Default 100, beside the
            user's step 200.
        max_side: Layers with a longer side of their matrix are treated as mean-field; default 4096.
        fisher: ``"sampled"`` draws labels from the module's attribute ``likelihood``, for the Fisher; ``"empirical"`` uses
            the data's. None draws them where there is such an attribute.
        kl_clip: c, bound of the squared Fisher norm of the algorithm's own step; None for none.
        factors: ``"kfac"`` by either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``. Default ``"kfac"``.
        unsupported_layers: The treatment of layers that ``engine="backpack"`` has no factors for: ``"refuse"`` names them,
            ``"mean_field"`` measures their squared gradients, ``"fused"`` takes our own rules. Default ``"refuse"``.
    """

    stats_interval: int
    inverse_interval: int
    max_side: int
    fisher: FisherName | None
    kl_clip: float | Schedule | None
    factors: KroneckerQuantity
    unsupported_layers: UnsupportedLayers


def _merge_docstrings(*records: Any) -> None:
    """Append the inherited attributes to each record's docstring, where jsonargparse looks for help texts."""
    inherited = ""
    for record in records:
        head, _, own = (record.__doc__ or "").partition("Attributes:\n")
        inherited = f"{inherited.rstrip()}\n{own.rstrip()}\n".lstrip(
            "\n"
        )  # of two entries of a name the last one counts
        record.__doc__ = f"{head}Attributes:\n{inherited}    "


_merge_docstrings(HyperparameterFields, CallbackFields, KroneckerFields)

_OF_CALLBACK = ("lr", "num_data", "prior_precision", "eval_samples", "val_samples", "linearized", "link")
_OPEN = dict.fromkeys(
    ("lr", "prior_precision", "data_augmentation_factor", "link", "curvature_interval")
)  # decided by the callback or at the fit
_DEFAULTS = {**_OPEN, "linearized": False}


class CallbackArguments(NamedTuple):
    """The arguments of a callback, completed by defaults."""

    lr: float | Schedule | None
    step: StepName | None
    num_data: int | None
    prior_precision: float | Schedule | None
    eval_samples: int
    linearized: bool
    val_samples: int | None
    link: Link | None
    group_defaults: dict[str, Any]  # hyperparameters of every parameter group
    optimizer_kwargs: dict[str, Any]  # the other arguments of the optimizer


def complete_arguments(
    callback: str, optimizer_class: type[MeanFieldOptimizer], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> CallbackArguments:
    """Complete the arguments of a callback by defaults, check them, and sort them by who takes them.

    Args:
        callback: Name of the callback's class, for messages.
        optimizer_class: The optimizer, whose record has the ranges.
        given: The arguments that were given.
        defaults: Defaults of the callback, where they differ from the optimizer's.

    Returns:
        All arguments.
    """
    record = optimizer_class.hyperparameters
    known = [*CallbackFields.__optional_keys__, *record.own_names()]
    _require_known(callback, given, known)
    stated = {name: value for name, value in given.items() if name != "step"}  # which is a count in the record
    values = {**record.defaults(), **optimizer_class.own_defaults, **_DEFAULTS, **defaults, **plain(stated)}
    record.check(values)
    check_names(values["engine"], values["loss_reduction"])
    of_callback = {name: values[name] for name in _OF_CALLBACK}
    others = [name for name in known if name in values and name not in {*of_callback, "step"}]
    in_group = {name: values[name] for name in others if record.settings()[name].in_group}
    return CallbackArguments(
        **of_callback,
        step=given.get("step"),
        group_defaults=in_group,
        optimizer_kwargs={name: values[name] for name in others if name not in in_group},
    )


def _require_known(callback: str, given: Iterable[str], known: list[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise TypeError(
            f"{callback} has no argument {', '.join(unknown)}.{hint} Its arguments are: {', '.join(sorted(known))}."
        )
