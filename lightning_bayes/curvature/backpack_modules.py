"""Operations as modules, and labels under a seed, for BackPACK's second-order quantities.

BackPACK propagates curvature from the loss to the parameters through the backward hooks of modules. A function call between
modules breaks this chain. Inside `AsModules`, supported operations (activations, pooling, flattening, sums, dropout) and
loss functions run as newly created BackPACK modules, whether the model calls a function or a torch module. So models need no
conversion, and a module without parameters may be called several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from backpack import extend
from backpack.custom_module.branching import SumModule
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.loss_functions import ADVICE, likelihood_call, read_call
from lightning_bayes.curvature.private_backpack import layer_extension
from lightning_bayes.curvature.rules.random_numbers import seeded
from lightning_bayes.curvature.rules.registry import computes
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError

STOCK_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.Embedding,
)
# From an operation to the module that computes it, built with the operation's arguments after the input.
_ACTIVATIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), nn.ReLU),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), nn.Sigmoid),
    **dict.fromkeys((torch.tanh, Tensor.tanh), nn.Tanh),
    **{F.elu: nn.ELU, F.selu: nn.SELU, F.leaky_relu: nn.LeakyReLU, F.logsigmoid: nn.LogSigmoid},
}
_POOLING: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), nn.MaxPool1d),  # older releases report the functions in torch
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), nn.MaxPool2d),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), nn.MaxPool3d),
    **{F.avg_pool1d: nn.AvgPool1d, F.avg_pool2d: nn.AvgPool2d, F.avg_pool3d: nn.AvgPool3d},
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
}
CREATED: frozenset[Any] = frozenset([*_ACTIVATIONS.values(), *_POOLING.values()])
_SHAPES = (torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape)
_SUMS = (torch.add, Tensor.add)
_MEANS = (torch.mean, Tensor.mean)
# By the number of dimensions of the input.
_GLOBAL_POOLING = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}
_LOSSES: dict[Any, Callable[..., nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


class AsModules(TorchFunctionMode):
    """Inside the context, supported operations on tensors with gradients run as BackPACK modules."""

    def __init__(self, quantity: str, otherwise: str = "measure 'squared_gradients'") -> None:
        super().__init__()
        self.quantity, self.otherwise = quantity, otherwise
        self.losses: list[Tensor] = []
        self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not self._is_paused:
            if func in _LOSSES:
                return self._loss(func, args, kwargs)
            module = _as_module(func, args, kwargs) if _has_grad(args) else None
            if module is not None:
                if isinstance(module, SumModule) and self.quantity == "kfra":
                    raise UnsupportedLayerError(
                        "BackPACK's kfra does not follow branches such as x + f(x). Use 'kfac' or 'kflr', or "
                        f"{self.otherwise}."
                    )
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
        if not self.losses:
            raise UnsupportedTrainingError(f"BackPACK needs a loss that one supported loss function returns. {ADVICE}")
        node = loss.grad_fn
        if divided_by_host and node is not None:
            node = node.next_functions[0][0]
        if not any(node is result.grad_fn for result in self.losses):
            raise UnsupportedTrainingError(
                f"The loss is not the result of one loss function alone, so BackPACK would miss its other terms. {ADVICE}"
            )

    def require_known(self, x: Tensor, consumer: str) -> None:
        """Require that `x`, input of the module `consumer`, is an input of the model or the output of a BackPACK module."""
        if x.grad_fn is not None and x.grad_fn.name() != "BackwardHookFunctionBackward":
            raise UnsupportedLayerError(
                f"{consumer} follows {x.grad_fn.name()}, an operation that BackPACK's {self.quantity} does not support. "
                "Build the model from layers, activations, pooling, flatten and a + b, as BackPACK supports them, or "
                f"{self.otherwise}."
            )

    def _run(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        for x in inputs:
            self.require_known(x, type(module).__name__)
        output: Tensor = extend(module)(*inputs)
        return output

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        call, _ = likelihood_call(read_call(func, args, kwargs), "BackPACK")
        smoothing = {name: value for name, value in call.options.items() if name == "label_smoothing"}
        module = extend(_LOSSES[func](reduction=call.reduction, **smoothing))
        self.require_known(call.outputs, type(module).__name__)
        loss: Tensor = module(call.outputs, call.targets)
        self.losses.append(loss)
        return loss


def _has_grad(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad


def _as_module(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """The module that computes ``func(*args, **kwargs)``, or None if BackPACK has none."""
    if kwargs.get("inplace"):
        return None
    x, options = args[0], {key: value for key, value in kwargs.items() if key != "inplace"}
    if func in _ACTIVATIONS:
        return _ACTIVATIONS[func](*args[1:], **options)
    if func in _POOLING:
        return _as_pooling(_POOLING[func], args[1:], options)
    if func is F.dropout:
        training = options.pop("training", True)
        return nn.Dropout(*args[1:], **options).train(training)
    if func in _MEANS:
        return _as_global_pooling(x, *args[1:], **options)
    if func in _SHAPES and x.dim() > 2 and func(*args, **kwargs).shape == (len(x), x[0].numel()):
        return nn.Flatten()
    return _as_sum(args) if func in _SUMS and not kwargs else None


def _as_pooling(kind: Callable[..., nn.Module], args: tuple[Any, ...], options: dict[str, Any]) -> nn.Module | None:
    module = kind(*args, **options)
    if isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        # BackPACK silently ignores the divisor, and fails on windows that leave the input.
        is_known = not module.ceil_mode and getattr(module, "divisor_override", None) is None
    elif isinstance(module, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        # From the fifth argument on, function and module have different orders; indices are a second output.
        is_known = len(args) < 5 and not module.return_indices
    else:
        is_known = True
    return module if is_known else None


def _as_global_pooling(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> nn.Module | None:
    """Global average pooling for a mean over all positions; None for any other mean."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if options or x.dim() not in _GLOBAL_POOLING or sorted(d % x.dim() for d in dims) != list(range(2, x.dim())):
        return None
    pooling = _GLOBAL_POOLING[x.dim()](1)
    return pooling if keepdim else nn.Sequential(pooling, nn.Flatten())


def _as_sum(args: tuple[Any, ...]) -> nn.Module | None:
    x, other = args
    if not isinstance(other, Tensor) or x.dim() < 2 or other.shape != x.shape:
        return None
    module: nn.Module = SumModule()
    return module


def seed_labels(extension: Any, mc_samples: int, seed: int) -> None:
    """Make an extension such as ``KFAC(mc_samples)`` sample its labels from a seed, not from global generators."""
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        original = layer_extension(extension, kind)
        if original is not None:
            extension.set_module_extension(kind, _SeededLabels(original, mc_samples, seed), overwrite=True)


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
