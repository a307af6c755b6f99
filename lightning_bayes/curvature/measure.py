"""`measure`: the gradient and the curvature of one loss, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args, overload

from torch import Tensor, nn

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine, EngineName, GradientEngine
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.kronecker import (
    KroneckerCapture,
    KroneckerEngine,
    blocks_by_parameter,
    request_all_layers,
)
from lightning_bayes.curvature.layouts import gradients_restored
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
    """Build the engine that measures `quantity` for `model`.

    Args:
        name: ``"fused"`` (this package's rules) or ``"backpack"`` (BackPACK's rules, and this package's for the layers
            that it does not have). The second-order diagonals use BackPACK with either name.
        model: The model whose passes will be measured.
        loss_reduction: ``"auto"`` reads the reduction from the loss's recorded calls; ``"mean"`` and ``"sum"`` declare it.
        workspace_mib: Memory limit in MiB for per-example values.
        quantity: The measured quantity, see `measure`. ``"gradient"`` measures no curvature and needs no rules.
            ``"kfac"``, ``"kflr"`` and ``"kfra"`` measure the layers of a request, see `KroneckerEngine.capture`.
        mc_samples: Labels per example for ``"diag_ggn_mc"``.
        seed: Seed of these labels, as in `measure`.

    Returns:
        The engine. Raises `HyperparameterError` if a name is unknown or `name` does not support these Kronecker factors.
    """
    check_names(name, loss_reduction)
    if quantity == "gradient":
        return GradientEngine(model, loss_reduction)
    if quantity == "kfac" or quantity == "kflr" or quantity == "kfra":
        return _kronecker_engine(name, model, loss_reduction, workspace_mib, quantity)
    if quantity != "squared_gradients":
        from lightning_bayes.curvature.backpack import SecondOrderEngine  # defers the import of BackPACK

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
    from lightning_bayes.curvature.backpack import BackpackFactors, has_backpack_factors

    records = partial(BackpackFactors, quantity=quantity)
    return KroneckerEngine(model, loss_reduction, workspace_mib, records, has_backpack_factors)


def check_names(engine: str, loss_reduction: str) -> None:
    """Raise `HyperparameterError` for an unknown engine or loss reduction."""
    if loss_reduction not in get_args(LossReduction):
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

    Runs the closure and its backward pass once. The parameters and their ``.grad`` are unchanged on return. BatchNorm in
    training mode updates its running statistics as in any forward pass.

    Args:
        model: Any module. Parameters with ``requires_grad=False`` are not measured.
        closure: Returns a scalar loss: the mean or the sum over examples of a negative log-likelihood in nats.
        quantity: The measured quantity. `lightning_bayes.curvature.measurement` lists the equations.

            - ``"squared_gradients"``: diagonal of the empirical Fisher, for any model and loss. With
              `Likelihood.sampled_loss` it estimates the Fisher itself.
            - ``"kfac"``: `KroneckerFactors`, with either engine.
            - ``"kflr"``, ``"kfra"`` (`KroneckerFactors`), ``"diag_ggn"``, ``"diag_ggn_mc"``, ``"diag_hessian"``: only with
              ``engine="backpack"``, for models of layers that BackPACK supports.

            All but the first require a closure that returns the result of ``F.cross_entropy``, ``F.mse_loss`` or
            ``F.binary_cross_entropy_with_logits`` (or of their modules).
        engine: ``"fused"`` or ``"backpack"``.
        loss_reduction: ``"auto"``; or ``"mean"`` or ``"sum"`` for a loss whose reduction is not recorded.
        mc_samples: Labels per example for ``"kfac"`` and ``"diag_ggn_mc"``.
        seed: Seed of these labels; None draws a seed from torch's global generator, which is not used otherwise.
        workspace_mib: Memory limit in MiB for per-example values.

    Returns:
        Means over the examples that count in the loss, by parameter name.

    Raises:
        HyperparameterError: If a name is unknown, the engine does not measure the quantity, or `mc_samples` is below 1.

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
    _require_measurable(engine, quantity)
    if mc_samples < 1:
        raise HyperparameterError(f"mc_samples={mc_samples} must be at least 1.")
    with gradients_restored(model.parameters()):
        measuring_engine = make_engine(
            engine, model, loss_reduction, workspace_mib, quantity=quantity, mc_samples=mc_samples, seed=seed
        )
        if isinstance(measuring_engine, KroneckerEngine):
            source = "BackPACK" if engine == "backpack" else "This package"
            request = request_all_layers(measuring_engine, source, quantity, mc_samples, seed)
            capture: AbstractContextManager[Capture] = measuring_engine.capture(request)
        else:
            capture = measuring_engine.capture()
        with capture as captured:
            loss = closure()
            captured.observe(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        captured.close()
        return _by_name(model, captured)


def _require_measurable(engine: str, quantity: str) -> None:
    if engine != "backpack" and quantity not in {"squared_gradients", "kfac"}:
        raise HyperparameterError(f"engine={engine!r} does not measure {quantity!r}; pass engine='backpack'.")


def _by_name(model: nn.Module, captured: Capture) -> Measurement[Any]:
    curvature: Mapping[nn.Parameter, Any]
    curvature = blocks_by_parameter(captured) if isinstance(captured, KroneckerCapture) else captured.mean_curvature()
    named = [(name, p, p.grad) for name, p in model.named_parameters() if p in curvature]
    factor = captured.gradient_factor
    assert captured.loss is not None
    return Measurement(
        loss=captured.loss,
        grad={name: grad * factor for name, _, grad in named if grad is not None},
        curvature={name: curvature[p] for name, p, grad in named if grad is not None},
        num_examples=captured.num_examples,
    )
