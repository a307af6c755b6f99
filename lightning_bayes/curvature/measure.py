"""`measure`: what one loss says about the curvature, outside of any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_bayes.curvature.engine import AbstractEngine, EngineName
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measurement import Measurement, Quantity
from lightning_bayes.errors import HyperparameterError


def make_engine(name: EngineName, model: nn.Module, loss_reduction: LossReduction = "auto") -> AbstractEngine:
    """Build the engine called `name` for `model`.

    Args:
        name: ``"fused"`` (our rules, any layer) or ``"backpack"`` (BackPACK's own, the layers it knows).
        model: The model whose passes will be measured.
        loss_reduction: ``"auto"`` reads from the loss's graph how it reduces its examples; or declare it.

    Returns:
        The engine.

    """
    check_names(name, loss_reduction)
    if name == "fused":
        return FusedEngine(model, loss_reduction)
    from lightning_bayes.curvature.backpack import (
        BackpackEngine,  # here, so that BackPACK is loaded only where it is used
    )

    return BackpackEngine(model, loss_reduction)


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


def measure(
    model: nn.Module,
    closure: Callable[[], Tensor],
    quantity: Quantity = "squared_gradients",
    *,
    engine: EngineName = "fused",
    loss_reduction: LossReduction = "auto",
) -> Measurement:
    """Gradient and curvature of one loss, as means over the examples of its batch.

    Runs the closure and its backward pass once. The model, its parameters and their ``.grad`` are left as they were
    (BatchNorm in training mode counts the forward, as always).

    Args:
        model: Any module; parameters with ``requires_grad=False`` are left out.
        closure: Computes the loss, a scalar: the mean or the sum over examples of a negative log-likelihood in nats.
        quantity: What to measure: ``"squared_gradients"``, the diagonal of the empirical Fisher.
        engine: ``"fused"`` or ``"backpack"``.
        loss_reduction: ``"auto"``, or a declaration where the loss is built in an unusual way.

    Returns:
        Means over the examples that count in the loss, by parameter name.

    Raises:
        HyperparameterError: If the quantity or the engine is unknown.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> m = measure(model, lambda: 0.5 * torch.nn.functional.mse_loss(model(x), y))
        >>> m.grad["weight"], m.curvature["weight"]  # g = [1, 9]: their mean, and the mean of their squares
        (tensor([[5.]]), tensor([[41.]]))
    """
    if quantity != "squared_gradients":
        raise HyperparameterError(f"quantity={quantity!r} is unknown; use 'squared_gradients'.")
    chosen = make_engine(engine, model, loss_reduction)
    with _own_gradients(model):
        with chosen.capture() as captured:
            loss = closure()
            captured.observe(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        chosen.check_reached(captured)
        factor, squares = captured.gradient_factor(), captured.mean_squares()
        named = [(name, p) for name, p in model.named_parameters() if p in squares and p.grad is not None]
        return Measurement(
            loss=loss.detach(),
            grad={name: p.grad * factor for name, p in named if p.grad is not None},
            curvature={name: squares[p] for name, p in named},
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
