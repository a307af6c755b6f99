"""`measure`: what one loss says about the curvature, outside of any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args, overload

from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine, EngineName
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.gradients import GradientEngine
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.curvature.layer_blocks import blocks_by_parameter, capture_blocks
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measurement import (
    DiagonalQuantity,
    KroneckerFactors,
    KroneckerQuantity,
    Measurement,
    Quantity,
)
from lightning_bayes.curvature.workspace import DEFAULT_MIB
from lightning_bayes.errors import HyperparameterError

_QUANTITIES: tuple[str, ...] = get_args(Quantity)


def make_engine(
    name: EngineName,
    model: nn.Module,
    loss_reduction: LossReduction = "auto",
    workspace_mib: float = DEFAULT_MIB,
    *,
    quantity: Quantity | Literal["gradient"] = "squared_gradients",
    mc_samples: int = 1,
    seed: int | None = None,
) -> AbstractEngine:
    """Build the engine called `name` for `model`.

    Args:
        name: ``"fused"`` (our rules, any layer) or ``"backpack"`` (BackPACK with our rules, layer by layer).
        model: The model whose passes will be measured.
        loss_reduction: ``"auto"`` reads from the loss's graph how it reduces its examples; or declare it.
        workspace_mib: Memory in MiB that a rule may fill at once with values of single examples.
        quantity: The quantity that passes measure, see `measure`; ``"gradient"``, no curvature, needs no rules.
            Passes of ``"kfac"``, ``"kflr"`` and ``"kfra"`` measure on request, see `KroneckerEngine.capture`.
        mc_samples: Labels that ``"diag_ggn_mc"`` draws per example.
        seed: Their seed, as in `measure`.

    Returns:
        The engine; a `HyperparameterError` says where it does not measure the quantity.
    """
    check_names(name, loss_reduction)
    if quantity == "gradient":
        return GradientEngine(model, loss_reduction)
    if quantity == "kfac" or quantity == "kflr" or quantity == "kfra":
        return _kronecker_engine(name, model, loss_reduction, workspace_mib, quantity)
    if quantity != "squared_gradients":
        from lightning_bayes.curvature.second_order import SecondOrderEngine  # loads BackPACK only where it is used

        return SecondOrderEngine(model, quantity, loss_reduction, mc_samples, seed)
    if name == "fused":
        return FusedEngine(model, loss_reduction, workspace_mib)
    from lightning_bayes.curvature.backpack import BackpackEngine

    return BackpackEngine(model, loss_reduction, workspace_mib=workspace_mib)


def _kronecker_engine(
    name: EngineName, model: nn.Module, loss_reduction: LossReduction, workspace_mib: float, quantity: KroneckerQuantity
) -> KroneckerEngine:
    _require_measurable(name, quantity)
    if name == "fused":
        return KroneckerEngine(model, loss_reduction, workspace_mib)
    from lightning_bayes.curvature.backpack_factors import BackpackFactors, has_backpack_factors

    records = partial(BackpackFactors, quantity=quantity)
    return KroneckerEngine(model, loss_reduction, workspace_mib, records, has_backpack_factors)


def check_names(engine: str, loss_reduction: str) -> None:
    """Require an engine and a reduction that exist.

    Args:
        engine: Name of an engine.
        loss_reduction: Name of a reduction.

    Raises:
        HyperparameterError: If one does not.
    """
    if loss_reduction not in {"auto", "mean", "sum"}:
        raise HyperparameterError(f"loss_reduction={loss_reduction!r} is unknown; use 'auto', 'mean' or 'sum'.")
    if engine not in {"fused", "backpack"}:
        raise HyperparameterError(f"engine={engine!r} is unknown; use 'fused' or 'backpack'.")


@overload
def measure(
    model: nn.Module,
    closure: Callable[[], Tensor],
    quantity: DiagonalQuantity = ...,
    *,
    engine: EngineName = ...,
    loss_reduction: LossReduction = ...,
    mc_samples: int = ...,
    seed: int | None = ...,
    workspace_mib: float = ...,
) -> Measurement[Tensor]: ...


@overload
def measure(
    model: nn.Module,
    closure: Callable[[], Tensor],
    quantity: KroneckerQuantity,
    *,
    engine: EngineName = ...,
    loss_reduction: LossReduction = ...,
    mc_samples: int = ...,
    seed: int | None = ...,
    workspace_mib: float = ...,
) -> Measurement[KroneckerFactors]: ...


def measure(
    model: nn.Module,
    closure: Callable[[], Tensor],
    quantity: Quantity = "squared_gradients",
    *,
    engine: EngineName = "fused",
    loss_reduction: LossReduction = "auto",
    mc_samples: int = 1,
    seed: int | None = None,
    workspace_mib: float = DEFAULT_MIB,
) -> Any:
    """Gradient and curvature of one loss, as means over the examples of its batch.

    Runs the closure and its backward pass once. The model, its parameters and their ``.grad`` are left as they were
    (BatchNorm in training mode counts the forward, as always).

    Args:
        model: Any module; parameters with ``requires_grad=False`` are left out.
        closure: Computes the loss, a scalar: the mean or the sum over examples of a negative log-likelihood in nats.
        quantity: The quantity to measure, with the equations in `lightning_bayes.curvature.measurement`:
            ``"squared_gradients"`` is the diagonal of the empirical Fisher, of any model and loss (with
            `Likelihood.sampled_loss`, of the Fisher itself). The others need a closure that returns what
            ``F.cross_entropy``, ``F.mse_loss`` or ``F.binary_cross_entropy_with_logits`` (or their modules) returns:
            ``"kfac"``, whose curvature are `KroneckerFactors`, by either engine; and with ``engine="backpack"``, for models
            of layers that BackPACK knows, ``"kflr"`` and ``"kfra"`` alike, ``"diag_ggn"``, ``"diag_ggn_mc"`` and
            ``"diag_hessian"``.
        engine: ``"fused"`` or ``"backpack"``.
        loss_reduction: ``"auto"``, or a declaration where the loss is built in an unusual way.
        mc_samples: Labels that ``"kfac"`` and ``"diag_ggn_mc"`` draw per example.
        seed: Seed of these draws, which leave torch's generators alone; None draws a seed from the global one.
        workspace_mib: Memory in MiB that a rule may fill at once with values of single examples.

    Returns:
        Means over the examples that count in the loss, by parameter name.

    Raises:
        HyperparameterError: If the quantity or the engine is unknown, or the engine does not measure the quantity.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> m = measure(model, lambda: 0.5 * torch.nn.functional.mse_loss(model(x), y))
        >>> m.grad["weight"], m.curvature["weight"]  # g = [1, 9]: their mean, and the mean of their squares
        (tensor([[5.]]), tensor([[41.]]))
        >>> m = measure(model, lambda: torch.nn.functional.mse_loss(model(x), y), "diag_hessian", engine="backpack")
        >>> m.curvature["weight"]  # 2 x² = [2, 18]: their mean
        tensor([[10.]])
    """
    check_names(engine, loss_reduction)
    if quantity not in _QUANTITIES:
        raise HyperparameterError(f"quantity={quantity!r} is unknown; use one of {', '.join(_QUANTITIES)}.")
    with _own_gradients(model):
        _check_draws(quantity, engine, mc_samples)
        made = make_engine(
            engine, model, loss_reduction, workspace_mib, quantity=quantity, mc_samples=mc_samples, seed=seed
        )
        if isinstance(made, KroneckerEngine):
            source = "BackPACK" if engine == "backpack" else "This package"
            blocks = capture_blocks(made, closure, source, quantity, mc_samples, seed)
            return _by_name(model, blocks, blocks_by_parameter(blocks))
        captured, curvature = _measured(made, closure)
        return _by_name(model, captured, curvature)


def _check_draws(quantity: str, engine: str, mc_samples: int) -> None:
    _require_measurable(engine, quantity)
    if mc_samples < 1:
        raise HyperparameterError(f"mc_samples={mc_samples} must be at least 1.")


def _require_measurable(engine: str, quantity: str) -> None:
    if engine != "backpack" and quantity not in {"squared_gradients", "kfac"}:
        raise HyperparameterError(f"engine={engine!r} does not measure {quantity!r}; pass engine='backpack'.")


def _measured(engine: AbstractEngine, closure: Callable[[], Tensor]) -> tuple[Capture, dict[nn.Parameter, Tensor]]:
    with engine.capture() as captured:
        loss = closure()
        captured.observe(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    engine.check_reached(captured)
    return captured, captured.mean_curvature()


def _by_name(model: nn.Module, captured: Capture, curvature: dict[nn.Parameter, Any]) -> Measurement[Any]:
    named = [(name, p, p.grad) for name, p in model.named_parameters() if p in curvature]
    factor = captured.gradient_factor()
    assert captured.loss is not None
    return Measurement(
        loss=captured.loss,
        grad={name: grad * factor for name, _, grad in named if grad is not None},
        curvature={name: curvature[p] for name, p, grad in named if grad is not None},
        num_examples=captured.num_examples,
    )


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Set the parameters' ``.grad`` aside and bring it back."""
    kept = [(param, param.grad) for param in model.parameters()]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad
