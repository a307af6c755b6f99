"""The arguments of the callbacks: one typed source for type checkers, editors and jsonargparse.

They extend the arguments that optimizers and callbacks share (`optim.hyperparameters.HyperparameterFields`). Defaults and
ranges come from the hyperparameter record of the callback's optimizer, so each algorithm defines them once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_bayes.callbacks.arguments import require_known
from lightning_bayes.curvature import check_names
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import FisherName, Schedule, VariationalOptimizer
from lightning_bayes.optim.hyperparameters import HyperparameterFields, StepName
from lightning_bayes.optim.kronecker.arguments import UnsupportedLayers
from lightning_bayes.optim.parameters import require_pattern
from lightning_bayes.optim.settings import plain
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import LinkArgument


class CallbackFields(HyperparameterFields, total=False):
    """Arguments of the callbacks.

    Attributes:
        lr: Learning rate α of the paper's natural-gradient step, at the peak of the user's schedule. None selects the
            default step: the user's optimizer updates the mean (see `optim.steps.base_optimizer`; a heuristic). Schedulers
            act on both.
        step: ``"user"``: the user's optimizer updates the mean. ``"natural"``, which requires `lr`: the paper's step.
            None: ``"user"`` without `lr`, ``"natural"`` with it; without `lr`, OGN, K-FAC and
            Vprop-0 take their natural step within a trust region (`optim.steps.trust_region`).
        mc_samples: K, weight samples per batch and process in training; default 1, for CVI 10.
        eval_samples: S, weight samples in validation, test and prediction; 0 evaluates at the posterior mean. Default 10.
        linearized: Whether validation, test and prediction linearise the model around the mean, f(x, μ) + J (θ - μ), which
            stays sensible under wide posteriors; default False. See `lightning_bayes.predictive.LinearizedSamples`.
        val_samples: Weight samples for validation during a fit; each costs one forward pass per batch. 0 validates at the
            posterior mean. None: 3, or S if S is smaller.
        prior_precision: δ of the prior N(μ₀, 1/δ). None: δ = Ñ·wd/τ from the optimizer's L2 ``weight_decay``. Without weight
            decay, 1 with an explicit `lr`, and for OGN, K-FAC and Vprop-0. In the default step, no prior acts on the mean:
            it is unregularised, because the implicit prior is centred at the mean, with a precision set by the curvature
            (`posteriors.shaped_noise`).
        prior: A mean-field posterior of earlier data, or a checkpoint with one. It sets μ₀ and δ of each weight that it
            contains, by the LightningModule's names, as if training continued with all data (`optim.weight_prior`). Other
            weights keep `prior_mean` and `prior_precision`. Use a posterior trained with an explicit `lr`: the default
            step's posterior is tempered, so as a prior it would count its data many times.
        data_augmentation_factor: ρ; augmentation makes N examples count as ρN. None: the data module's factor, else 1.
        num_data: N, number of training examples; None counts the examples of the trainer's data loader.
        init_precision: Posterior precision before the first update; the default step replaces it at the first update. None
            uses the curvature of the first batch.
        relative_noise: κ, root mean square of each tensor's noise relative to the tensor's size. The curvature shapes the
            noise (`posteriors.shaped_noise`), and the data reduce it where they are informative. None: with an explicit
            `lr`, the noise of the variational bound. With the default step, classifiers (detected from `link` or the loss)
            use 0.005 with normalisation layers, else 0.3 with convolutions and 0.07 without; other models use 0.01; networks
            of more than five layers use less (`optim.default_noise`). These are heuristics.
        noise_flatness: ε, flatness of the noise of size κ (`posteriors.shaped_noise`). None: 0.03; where κ defaults to
            0.3, 1; where it defaults to 0.07, 0.001.
        curvature_interval: T, updates between curvature measurements, after ten updates that all measure; the other updates
            run the bare model. None: 10 if the user's optimizer sets the step or its length and updates may skip the
            measurement (`optim.measuring`), else 1.
        link: How outputs become predictions in evaluation: ``"classification"``, ``"binary"``, ``"multilabel"``,
            ``"regression"``, ``"counts"``; ``"mean_variance"``, ``"mean_log_variance"`` or ``"mean_std"`` for networks that
            return both; or a function from outputs to a `torch.distributions` object, such as `Quantiles`. None: the
            module's attribute ``lightning_bayes_link``, else the training loss tells, else raw outputs are averaged.
        calibrate: Whether the end of a fit chooses the width of the posterior and a temperature on the validation set, see
            `lightning_bayes.callbacks.Calibration`; default False.
        bayesian: Regular expression for the names of the parameters that have a posterior. The other parameters take the
            same step without noise. None selects all parameters; the default step excludes normalisation layers, each of
            whose parameters scales or shifts a whole channel: noise in them hurt a small ResNet most (a heuristic).
            ``"^head"`` gives a last-layer posterior.
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
    link: LinkArgument | None
    calibrate: bool


class KroneckerFields(CallbackFields, total=False):
    """Arguments of the callbacks for K-FAC and Noisy K-FAC.

    Attributes:
        stats_interval: T_stats, updates between curvature measurements; default 10, or 20 with the user's step.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns. Default 100, or 200 with
            the user's step.
        max_side: Layers whose matrix has a longer side are treated as mean-field; default 4096.
        fisher: ``"sampled"`` draws labels from the module's ``lightning_bayes_likelihood`` (the Fisher). ``"empirical"``
            uses the labels of the data. None draws labels if the module has such an attribute.
        kl_clip: c, bound of the squared Fisher norm of the algorithm's own step; None disables it.
        factors: ``"kfac"`` with either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``. Default ``"kfac"``.
        unsupported_layers: How to treat layers for which ``engine="backpack"`` has no factors: ``"refuse"`` raises an error
            that names them, ``"mean_field"`` measures their squared gradients, ``"fused"`` uses this package's rules.
            Default ``"refuse"``.
    """

    stats_interval: int
    inverse_interval: int
    max_side: int
    fisher: FisherName | None
    kl_clip: float | Schedule | None
    factors: KroneckerQuantity
    unsupported_layers: UnsupportedLayers


def _merge_docstrings(*records: Any) -> None:
    """Copy the inherited attributes into each record's docstring, where jsonargparse reads help texts."""
    inherited = ""
    for record in records:
        head, _, attributes = (record.__doc__ or "").partition("Attributes:\n")
        # If a name occurs twice, jsonargparse uses the last entry.
        inherited = f"{inherited.rstrip()}\n{attributes.rstrip()}\n".lstrip("\n")
        record.__doc__ = f"{head}Attributes:\n{inherited}    "


_merge_docstrings(HyperparameterFields, CallbackFields, KroneckerFields)

_UNDECIDED = ("lr", "prior_precision", "data_augmentation_factor", "link", "curvature_interval")  # None: chosen later
_DEFAULTS = {**dict.fromkeys(_UNDECIDED), "linearized": False, "calibrate": False}


class CallbackArguments(NamedTuple):
    """The arguments of a callback, with defaults filled in."""

    optimizer_class: type[VariationalOptimizer]
    lr: float | Schedule | None
    step: StepName | None
    num_data: int | None
    prior_precision: float | Schedule | None
    eval_samples: int
    linearized: bool
    val_samples: int | None
    link: LinkArgument | None
    calibrate: bool
    group_defaults: dict[str, Any]  # hyperparameters of every parameter group
    optimizer_kwargs: dict[str, Any]  # the other arguments of the optimizer


def complete_arguments(
    callback: str, optimizer_class: type[VariationalOptimizer], fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> CallbackArguments:
    """Fill in the defaults of a callback's arguments, check their ranges, and split them by consumer."""
    record = optimizer_class.hyperparameters
    names = {*CallbackFields.__optional_keys__, *record.own_names(), *defaults}
    require_known(callback, fields, names)
    passed = {name: value for name, value in fields.items() if name != "step"}  # the record's "step" is a counter
    values = {**record.defaults(), **optimizer_class.own_defaults, **_DEFAULTS, **defaults, **plain(passed)}
    record.check(values)
    check_names(values["engine"], values["loss_reduction"])
    require_pattern(values["bayesian"])
    _require_prior(values["prior"])
    values["step"] = fields.get("step")
    for_optimizer = {n: value for n, value in values.items() if n in names.difference(CallbackArguments._fields)}
    group_defaults = record.group_values(for_optimizer)
    return CallbackArguments(
        **{name: values[name] for name in CallbackArguments._fields if name in values},
        optimizer_class=optimizer_class,
        group_defaults=group_defaults,
        optimizer_kwargs={name: value for name, value in for_optimizer.items() if name not in group_defaults},
    )


def _require_prior(prior: object) -> None:
    """Raise `PosteriorError` if ``prior`` is neither a posterior nor the path of a file."""
    if prior is None or isinstance(prior, AbstractPosterior):
        return
    if not isinstance(prior, (str, os.PathLike)):
        raise PosteriorError(
            f"prior={prior!r} is a {type(prior).__name__}. Pass a posterior or the path of a checkpoint."
        )
    if not os.path.isfile(prior):
        raise PosteriorError(
            f"prior={os.fspath(prior)!r} is not a file. Pass the checkpoint of an earlier fit with a callback, such as "
            "trainer.checkpoint_callback.best_model_path, or a posterior."
        )


def refuse_unnamed(callback: str, unnamed: Sequence[Any]) -> None:
    """Raise a `TypeError` for positional arguments, with the keyword that the first one probably means."""
    if unnamed:
        first = unnamed[0]
        name = "mc_samples" if isinstance(first, int) else "prior" if isinstance(first, str | os.PathLike) else "lr"
        raise TypeError(f"{callback} takes keyword arguments only, got {first!r}. Did you mean {name}={first!r}?")
