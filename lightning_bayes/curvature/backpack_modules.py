"""BackPACK's hooks on a model, whose operations run as modules.

BackPACK propagates curvature from the loss to the parameters through the backward hooks of modules. A function call between
modules breaks this chain. Inside `AsModules`, supported operations (activations, pooling, flattening, sums, dropout) and
loss functions run as newly created BackPACK modules, whether the model calls a function or a torch module. So models need no
conversion, and a module without parameters may be called several times.

BackPACK cannot remove its hooks, they forbid changing a layer's output in place, and its errors name no module. So `watched`
does all this, and raises an error for what BackPACK would skip or overwrite.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from backpack import backpack, extend
from backpack.custom_module.branching import SumModule
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.private_backpack import hook_handles, is_backpacks, layer_extension
from lightning_bayes.curvature.rules.random_numbers import seeded
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.likelihood.loss_functions import ADVICE, likelihood_call, read_call
from lightning_bayes.private_torch import BACKWARD_HOOK_KIND

STOCK_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.Embedding,
)
_ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    **{"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "logsigmoid": nn.LogSigmoid},
    **{"elu": nn.ELU, "selu": nn.SELU, "leaky_relu": nn.LeakyReLU},
}
_POOLING: dict[str, Callable[..., nn.Module]] = {
    **{"max_pool1d": nn.MaxPool1d, "max_pool2d": nn.MaxPool2d, "max_pool3d": nn.MaxPool3d},
    **{"avg_pool1d": nn.AvgPool1d, "avg_pool2d": nn.AvgPool2d, "avg_pool3d": nn.AvgPool3d},
    **{f"adaptive_avg_pool{d}d": getattr(nn, f"AdaptiveAvgPool{d}d") for d in (1, 2, 3)},
}
CREATED: frozenset[Any] = frozenset([*_ACTIVATIONS.values(), *_POOLING.values()])
# From an operation to the module that computes it, built with the operation's arguments after the input.
_OPERATIONS: dict[Any, Callable[..., nn.Module]] = {
    getattr(owner, name): kind
    for name, kind in {**_ACTIVATIONS, **_POOLING}.items()
    for owner in (F, torch, Tensor)
    if hasattr(owner, name)
}
_SHAPES = (torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape)
_LOSSES: dict[Any, Callable[..., nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


class AsModules(TorchFunctionMode):
    """Inside the context, supported operations on tensors with gradients run as BackPACK modules."""

    def __init__(self, quantity: str, otherwise: str) -> None:
        super().__init__()
        self.quantity, self.otherwise = quantity, otherwise
        self.losses: list[Tensor] = []
        self.called: list[str] = []  # layers
        self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not self._is_paused:
            if func in _LOSSES:
                return self._loss(func, args, kwargs)
            has_gradient = bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad
            module = _as_module(func, args, kwargs) if has_gradient else None
            if module is not None:
                return self._run(module, *args[: 2 if isinstance(module, SumModule) else 1])
        return func(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations unchanged inside the context."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def require_loss(self, loss: Tensor, divided_by_host: bool) -> None:
        """Require a loss that is the result of one supported loss function, and make its dtype the default."""
        torch.set_default_dtype(loss.dtype)  # BackPACK creates the kernels of its pooling in the default dtype
        node = loss.grad_fn
        if divided_by_host and node is not None:
            node = node.next_functions[0][0]
        if not any(node is result.grad_fn for result in self.losses):
            raise UnsupportedTrainingError(
                f"BackPACK needs a loss that one supported loss function returns, and would miss its other terms. {ADVICE}"
            )

    def before_call(self, unit: MeasuredModule, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook: refuse a call that BackPACK would measure wrongly."""
        if not torch.is_grad_enabled():
            return
        if not args:
            raise UnsupportedTrainingError(
                f"{unit.label} is called by keyword, and BackPACK cannot see keyword inputs. Call it as layer(x)."
            )
        if unit.label in self.called:
            raise UnsupportedLayerError(
                f"{unit.label} is called twice in one pass, and BackPACK would measure only one call. Use a separate layer "
                f"for each call, or {self.otherwise}."
            )
        if torch.is_autocast_enabled(args[0].device.type):
            raise UnsupportedTrainingError("BackPACK cannot run under autocast. Train in 32-true.")
        self.called.append(unit.label)
        self._require_known(args[0], unit.label)
        if self.quantity.startswith("kf") and isinstance(module, nn.Linear) and args[0].dim() != 2:
            raise UnsupportedLayerError(
                f"{unit.label} got an input of shape {list(args[0].shape)}, and BackPACK's {self.quantity} supports only "
                "inputs [examples, features] of linear layers. Use engine='fused'."
            )

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Name the layer and a remedy in torch's error about an output changed in place, and in BackPACK's errors."""
        advice = f"Replace the layer, freeze it with requires_grad_(False), or {self.otherwise}."
        try:
            yield
        except (RuntimeError, AssertionError, ValueError) as error:
            if "BackwardHookFunction" in str(error) or "inside a custom Function" in str(error):
                where = f", after {self.called[-1]} was called" if self.called else ""
                raise UnsupportedTrainingError(
                    f"The output of a layer is changed in place (such as `out += x`){where}, which BackPACK's hooks forbid. "
                    f"Write `out = out + x`. {advice}"
                ) from error
            frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
            is_torchs = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
            if is_torchs or not any("backpack" in path.parts for path in frames):
                raise
            raise UnsupportedLayerError(
                f"BackPACK cannot measure {self.quantity} of this model: {str(error).rstrip('.')}. {advice}"
            ) from error

    def _require_known(self, x: Tensor, consumer: str) -> None:
        """Require that `x`, input of the module `consumer`, is an input of the model or the output of a BackPACK module."""
        if x.grad_fn is not None and x.grad_fn.name() != "BackwardHookFunctionBackward":
            raise UnsupportedLayerError(
                f"{consumer} follows {x.grad_fn.name()}, an operation that BackPACK's {self.quantity} does not support. "
                "Build the model from layers, activations, pooling, flatten and a + b, as BackPACK supports them, or "
                f"{self.otherwise}."
            )

    def _run(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        for x in inputs:
            self._require_known(x, type(module).__name__)
        output: Tensor = extend(module)(*inputs)
        return output

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        call, _ = likelihood_call(read_call(func, args, kwargs), "BackPACK")
        smoothing = {name: value for name, value in call.options.items() if name == "label_smoothing"}
        module = extend(_LOSSES[func](reduction=call.reduction, **smoothing))
        self._require_known(call.outputs, type(module).__name__)
        self.losses.append(module(call.outputs, call.targets))
        return self.losses[-1]


def _as_module(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """The module that computes ``func(*args, **kwargs)``, or None if BackPACK has none."""
    if kwargs.get("inplace"):
        return None
    x, options = args[0], {key: value for key, value in kwargs.items() if key != "inplace"}
    if func in _OPERATIONS:
        module = _OPERATIONS[func](*args[1:], **options)
        return module if _has_known_options(module, len(args)) else None
    if func is F.dropout:
        training = options.pop("training", True)
        return nn.Dropout(*args[1:], **options).train(training)
    if func in {torch.mean, Tensor.mean}:
        return _as_global_pooling(x, *args[1:], **options)
    if func in _SHAPES and x.dim() > 2 and func(*args, **kwargs).shape == (len(x), x[0].numel()):
        return nn.Flatten()
    is_sum = func in {torch.add, Tensor.add} and not kwargs and x.dim() > 1 and isinstance(args[1], Tensor)
    return SumModule() if is_sum and args[1].shape == x.shape else None


def _has_known_options(module: nn.Module, num_arguments: int) -> bool:
    """Whether BackPACK reads all options of an operation. It silently ignores the divisor of average pooling."""
    if isinstance(module, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        # From the fifth option on, function and module have different orders; indices are a second output.
        return num_arguments < 6 and not module.return_indices
    is_average = isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d))
    return not (is_average and (module.ceil_mode or getattr(module, "divisor_override", None) is not None))


def _as_global_pooling(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> nn.Module | None:
    """Global average pooling for a mean over all positions; None for any other mean."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if options or x.dim() not in {3, 4, 5} or sorted(d % x.dim() for d in dims) != list(range(2, x.dim())):
        return None
    pooling = _POOLING[f"adaptive_avg_pool{x.dim() - 2}d"](1)
    return pooling if keepdim else nn.Sequential(pooling, nn.Flatten())


@contextmanager
def watched(
    model: nn.Module, layers: Sequence[MeasuredModule], extension: Any, as_modules: AsModules
) -> Iterator[dict[nn.Parameter, Any]]:
    """Run an extension that propagates curvature through `layers`; yields its results by parameter, complete on exit."""
    stored: dict[nn.Parameter, Any] = {}
    params, field = [param for layer in layers for param in layer.module.parameters()], extension.savefield
    with ExitStack() as undo:
        for module in (m for m in model.modules() if getattr(m, "inplace", False) is True):
            undo.callback(setattr, module, "inplace", True)
            setattr(module, "inplace", False)  # noqa: B010  # nn.Module declares no such attribute
        for layer in layers:
            before = partial(as_modules.before_call, layer)
            undo.callback(layer.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(lambda: stored.update({p: vars(p).pop(field) for p in params if field in vars(p)}))
        undo.enter_context(_extended([layer.module for layer in layers]))
        undo.enter_context(backpack(extension))
        undo.enter_context(as_modules)
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.enter_context(as_modules.errors_named())
        yield stored


@contextmanager
def _extended(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Attach BackPACK's hooks to `modules`. On exit, remove them and the attributes that they set."""
    kept = [(part, vars(part)) for module in modules for part in module.modules()]
    before = [(m, {n: v for n, v in of.items() if n == BACKWARD_HOOK_KIND or is_backpacks(n)}) for m, of in kept]
    handles = hook_handles()
    num_handles = len(handles)
    try:
        with warnings.catch_warnings():
            # torch warns that there are no input gradients; BackPACK does not need them.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            for module in modules:
                extend(module)
            yield
    finally:
        for handle in handles[num_handles:]:
            handle.remove()
        del handles[num_handles:]  # BackPACK itself never deletes a handle
        for module, attributes in before:
            for name in [name for name in vars(module) if is_backpacks(name)]:
                delattr(module, name)
            vars(module).update(attributes)


def seed_labels(extension: Any, mc_samples: int, seed: int) -> None:
    """Make an extension such as ``KFAC(mc_samples)`` sample its labels from a seed, not from global generators."""
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        seeded_labels = _SeededLabels(layer_extension(extension, kind), mc_samples, seed)
        extension.set_module_extension(kind, seeded_labels, overwrite=True)


@final
class _SeededLabels(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """BackPACK's extension of a loss function, under a seed."""

    def __init__(self, original: ModuleExtension, mc_samples: int, seed: int) -> None:
        super().__init__()
        self.original, self.mc_samples, self.seed = original, mc_samples, seed

    def backpropagate(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: None) -> Tensor:
        """Columns ``[V, N, *outputs]`` of a square root of the loss's Hessian with respect to the outputs."""
        outputs: Tensor = module.input0
        if not outputs.isfinite().all():  # torch cannot sample labels; the loss is not finite and its update is skipped
            return outputs.new_full((self.mc_samples, *outputs.shape), math.nan)
        with seeded(outputs.device, self.seed):
            sampled: Tensor = self.original.backpropagate(extension, module, g_inp, g_out, columns)
        return sampled


def is_stock(module: nn.Module) -> bool:
    """Whether `module` is exactly a torch layer whose options BackPACK's own rules support or refuse."""
    return (
        type(module) in STOCK_LAYERS
        and computes(module, type(module).forward)
        and getattr(module, "padding_mode", "zeros") == "zeros"  # BackPACK silently ignores other modes
        and getattr(module, "padding_idx", None) is None
        and not isinstance(getattr(module, "padding", 0), str)
        and not any(getattr(module, "output_padding", ()))
    )
