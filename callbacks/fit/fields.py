"""The arguments of the callbacks, those that optimizers and callbacks share and the following, and their defaults.

An algorithm's own arguments come from its optimizer, `own_arguments`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, TypedDict, get_args

from lightning_bayes.callbacks.trainer.arguments import require_known
from lightning_bayes.curvature import check_names
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.optim import Schedule, VariationalOptimizer
from lightning_bayes.optim.argument_help import ArgumentHelp, argument_help, with_arguments
from lightning_bayes.optim.default_noise import DefaultNoise
from lightning_bayes.optim.hyperparameters import HyperparameterFields, Number, OptimizerFields, StepName, StepRule
from lightning_bayes.optim.measuring import BASE_INTERVAL, require_interval
from lightning_bayes.optim.parameters import require_pattern
from lightning_bayes.optim.settings import COUNT, Declaration, Setting, declaration_of, joined_help, plain
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import LinkArgument


def _chosen_later(name: str) -> Setting:
    """The setting of an optimizer's argument, which a callback may leave None until the fit."""
    return replace(declaration_of(OptimizerFields).settings[name], default=None, chosen_later=True)


class CallbackOwn(TypedDict, total=False):
    """Arguments that only callbacks have, and what shared arguments mean there.

    Attributes:
        lr: Learning rate α of the paper's natural-gradient step, at the peak of the user's schedule. None: the default
            step, in which the user's optimizer updates the mean. It is a heuristic, see `optim.base_optimizer`. Schedulers
            act on both steps.
        step: What updates the mean, ``"user"`` for the user's optimizer or ``"natural"`` for the paper's step with `lr`.
            None: ``"user"`` without `lr`, ``"natural"`` with it. Without `lr`, OGN, K-FAC and Vprop-0 take their natural
            step within a trust region (`optim.steps`).
        mc_samples: K, weight samples per batch and process in training. Default: 1, for CVI 10.
        eval_samples: S, weight samples in validation, test and prediction, where 0 evaluates at the posterior mean.
            Default: 10.
        linearized: Whether validation, test and prediction linearise the model around the mean, f(x, μ) + J (θ - μ). This
            stays sensible under wide posteriors, see `lightning_bayes.predictive.LinearizedSamples`. Default: False.
        val_samples: Weight samples for validation during a fit, where 0 validates at the posterior mean. Each costs one
            forward pass per batch. None: 3, or S if S is smaller.
        prior_precision: δ of the prior N(μ₀, 1/δ). None: δ = Ñ·wd/τ from the optimizer's L2 ``weight_decay``, else 1 with an
            explicit `lr`, and for OGN, K-FAC and Vprop-0. In the default step without weight decay, no prior acts on the
            mean: it is unregularised, because the implicit prior is centred at the mean, with a precision set by the
            curvature (`posteriors.shaped_noise`).
        prior: A mean-field posterior of earlier data, or a checkpoint with one. It sets μ₀ and δ of each weight that it
            contains, by the LightningModule's names, as if training continued with all data (`optim.weight_prior`). Other
            weights keep `prior_mean` and `prior_precision`. Use a posterior trained with an explicit `lr`: the default
            step's posterior is tempered, so as a prior it would count its data many times.
        data_augmentation_factor: ρ, with which augmentation makes N examples count as ρN. None: the data module's factor,
            else 1.
        num_data: N, number of training examples. None: the examples of the trainer's data loader.
        init_precision: Posterior precision before the first update. None: the curvature of the first batch. The default step
            replaces it at the first update.
        relative_noise: κ, root mean square of each tensor's noise relative to the tensor's size. The curvature shapes the
            noise (`posteriors.shaped_noise`), and the data reduce it where they are informative. None: by kind of network
            in the default step, and with an explicit `lr` the noise of the variational bound. In the default step,
            classifiers (detected from `link` or the loss)
            use 0.005 with normalisation layers, else 0.3 with convolutions and 0.07 without; other models use 0.01; networks
            of more than five layers use less (`optim.default_noise`). With normalisation layers, it grows after
            epochs whose training loss is below 0.8 of the smallest validation NLL (`callbacks.fit.noise_rule`). These are
            heuristics.
        noise_flatness: ε, flatness of the noise of size κ (`posteriors.shaped_noise`). None: 0.03; where κ defaults to
            0.3, 1; where it defaults to 0.07, 0.001.
        curvature_interval: T, updates between curvature measurements, after ten updates that all measure. The other updates
            run the bare model. None: 10 in the default step for methods whose updates may skip the measurement, else 1. See
            `optim.measuring`.
        link: How outputs become predictions in evaluation: ``"classification"``, ``"binary"``, ``"multilabel"``,
            ``"regression"``, ``"counts"``, or ``"mean_variance"``, ``"mean_log_variance"``, ``"mean_std"`` for networks that
            return both, or a function from outputs to a `torch.distributions` object, such as `Quantiles`. None: the
            module's attribute ``lightning_bayes_link``, else what the training loss says, else raw outputs are averaged.
        calibrate: Whether the end of a fit chooses the width of the posterior and a temperature on the validation set, see
            `lightning_bayes.callbacks.Calibration`. None: without `lr`, a classifier gets a temperature, if the fit has
            validation data in pairs (inputs, targets). Both are shrunk towards 1, so that few examples change little.
        predict_once: Whether ``trainer.predict`` runs your ``predict_step`` once for each batch, with ``self(...)`` averaged
            inside, for example because it writes files. By default, it runs under each sample, and what it returns is
            averaged.
        bayesian: Regular expression for the names of the parameters that have a posterior. The other parameters take the
            same step without noise. None: all parameters, except for normalisation layers in the default step, where each
            parameter scales or shifts a whole channel. Noise in them hurt a small ResNet most (a heuristic).
            ``"^head"`` gives a last-layer posterior.
    """

    lr: Annotated[Number | None, _chosen_later("lr")]
    step: Annotated[StepName | None, Setting()]
    eval_samples: Annotated[int, Setting(COUNT, 10)]
    linearized: Annotated[bool, Setting(default=False)]
    val_samples: Annotated[int | None, Setting(COUNT, optional=True)]
    prior_precision: Annotated[Number | None, _chosen_later("prior_precision")]
    prior: Annotated[AbstractPosterior | str | os.PathLike[str] | None, Setting(in_group=False)]
    data_augmentation_factor: Annotated[Number | None, _chosen_later("data_augmentation_factor")]
    curvature_interval: Annotated[int | None, _chosen_later("curvature_interval")]
    link: Annotated[LinkArgument | None, Setting(takes_functions=True)]
    calibrate: Annotated[bool | None, Setting()]
    predict_once: Annotated[bool, Setting(default=False)]


class CallbackFields(HyperparameterFields, CallbackOwn, total=False):  # noqa: D101
    __doc__ = joined_help(HyperparameterFields, CallbackOwn)  # type: ignore[misc]


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
    calibrate: bool | None
    predict_once: bool
    group_defaults: dict[str, Any]  # hyperparameters of every parameter group
    optimizer_kwargs: dict[str, Any]  # the other arguments of the optimizer
    is_default_noise: bool
    is_default_interval: bool


def declaration(optimizer_class: type[VariationalOptimizer]) -> Declaration:
    """The arguments of a callback, with those that only its optimizer has."""
    return declaration_of(CallbackOwn, HyperparameterFields, optimizer_class.own_arguments)


def shared_help() -> str:
    """The arguments that all callbacks share, as a docstring."""
    return with_arguments(None, argument_help(HyperparameterFields, CallbackOwn, defaults={}))


def documented(callback: type, optimizer_class: type[VariationalOptimizer], defaults: Mapping[str, Any]) -> Signature:
    """Add the arguments to a callback's docstrings; its signature with their types and defaults, for `inspect`."""
    found = help_of(optimizer_class, defaults)
    callback.__doc__ = with_arguments(callback.__doc__, found)
    if initializer := vars(callback).get("__init__"):  # else the base's, with the arguments that all callbacks share
        initializer.__doc__ = with_arguments(None, found)
    return _signature(optimizer_class, defaults, signature(callback.__init__).parameters)  # type: ignore[misc]


def help_of(optimizer_class: type[VariationalOptimizer], defaults: Mapping[str, Any]) -> dict[str, ArgumentHelp]:
    """Purpose, range and default of each argument of a callback."""
    kinds = (HyperparameterFields, CallbackOwn, optimizer_class.own_arguments)
    return argument_help(*kinds, defaults={**optimizer_class.own_defaults, **defaults})


def _signature(
    optimizer_class: type[VariationalOptimizer], defaults: Mapping[str, Any], stated: Mapping[str, Parameter]
) -> Signature:
    """The arguments that a constructor states, such as ``hessian``, and those that are declared."""
    declared = declaration(optimizer_class)
    values = {**declared.defaults, **optimizer_class.own_defaults, **defaults}
    named = [parameter for parameter in stated.values() if parameter.kind is Parameter.KEYWORD_ONLY]
    parts = [Parameter(n, Parameter.KEYWORD_ONLY, default=values[n], annotation=t) for n, t in declared.types.items()]
    return Signature([*named, *parts])


def complete_arguments(
    callback: str,
    optimizer_class: type[VariationalOptimizer],
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    unnamed: Sequence[Any] = (),
) -> CallbackArguments:
    """Fill in and choose the defaults of a callback's arguments, check them, and split them by consumer."""
    _refuse_unnamed(callback, unnamed)
    declared, of_optimizer = declaration(optimizer_class), optimizer_class.declaration()
    require_known(callback, fields, set(declared.settings))
    values = {**declared.defaults, **optimizer_class.own_defaults, **defaults, **plain(fields)}
    declared.check(values)
    check_names(values["engine"], values["loss_reduction"])
    require_pattern(values["bayesian"])
    _require_prior(values["prior"])
    is_default_noise = values["lr"] is None and values["relative_noise"] is None
    is_default_interval = values["curvature_interval"] is None
    if is_default_noise:
        values["relative_noise"] = DefaultNoise.first
    values |= _chosen_step(callback, optimizer_class, values)
    optimizer_class.check_together(values)
    own = {name: values[name] for name in CallbackArguments._fields if name in values}
    for_optimizer = {name: value for name, value in values.items() if name not in own}
    group_defaults = of_optimizer.group_values(for_optimizer)
    return CallbackArguments(
        **own,
        optimizer_class=optimizer_class,
        group_defaults=group_defaults,
        optimizer_kwargs={name: value for name, value in for_optimizer.items() if name not in group_defaults},
        is_default_noise=is_default_noise,
        is_default_interval=is_default_interval,
    )


def _chosen_step(
    callback: str, optimizer_class: type[VariationalOptimizer], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The step and the curvature interval."""
    step_rule, interval = optimizer_class.default_step, values["curvature_interval"]
    _check_step(callback, values["lr"], values["step"], step_rule)
    if values["lr"] is not None:
        step_rule = "natural"
    if interval is None:
        interval = BASE_INTERVAL if step_rule == "user" and optimizer_class.amortises else 1
    require_interval(callback, interval, amortises=optimizer_class.amortises)
    return {"step_rule": step_rule, "curvature_interval": interval}


def _check_step(callback: str, lr: float | Schedule | None, step: StepName | None, default: StepRule) -> None:
    """Raise `HyperparameterError` if `step` contradicts `lr` or the optimizer."""
    if step not in {None, *get_args(StepName)}:
        raise HyperparameterError(f"{callback} got step={step!r}. Pass 'user', 'natural' or nothing.")
    if step == "user" and (lr is not None or default != "user"):
        reason = "it would then be the user's optimizer alone" if lr is None else f"lr={lr!r} sets the natural step"
        raise HyperparameterError(f"{callback} got step='user', but {reason}. Omit step='user'.")
    if step == "natural" and lr is None and default == "user":
        raise HyperparameterError(
            f"{callback} got step='natural' without lr. Pass lr=..., the learning rate of the paper's step, or omit step: "
            "the user's optimizer then moves the mean."
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


def _refuse_unnamed(callback: str, unnamed: Sequence[Any]) -> None:
    """Raise a `TypeError` for positional arguments, with the keyword that the first one probably means."""
    if unnamed:
        first = unnamed[0]
        name = "mc_samples" if isinstance(first, int) else "prior" if isinstance(first, str | os.PathLike) else "lr"
        raise TypeError(f"{callback} takes keyword arguments only, got {first!r}. Did you mean {name}={first!r}?")
