"""The linearised predictive: weight samples in the model's first-order expansion around the posterior mean.

    f_lin(x, θ) = f(x, μ) + J(x) (θ - μ)        J(x) = ∂f(x, θ)/∂θ at μ

For Gaussian weights the outputs are Gaussian with mean f(x, μ) and covariance J Σ Jᵀ, as in Immer et al. 2021,
https://arxiv.org/abs/2008.08217. Under a wide posterior, networks with sampled weights can fail; the expansion still
gives sensible predictions. Forward-mode differentiation (`torch.func.jvp`) computes products with J without forming J, and
f(x, μ) is computed once for several samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.likelihood.paths import leaves, mapped
from lightning_bayes.predictive.nested import stacked
from lightning_bayes.predictive.samples import PosteriorSamples, Samples

MAX_SAMPLES_PER_PASS = 16
MAX_ELEMENTS_PER_PASS = 2**24  # elements of θ_s - μ over the samples of a pass: 64 MiB of float32


@final
class LinearizedSamples(Samples):
    """Outputs of the model's linearisation at the posterior mean, under S weight samples.

    A layer without a forward-mode derivative raises an `UnsupportedLayerError` that names the layer.

    Args:
        samples: The weight samples.
    """

    def __init__(self, samples: PosteriorSamples) -> None:
        self.samples, self.count = samples, samples.count

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Compute f(x, μ) + J (θ_s - μ) for several samples per pass of `forward`; whole numbers are those at the mean."""
        _load_derivatives()
        mean, call = self.samples.posterior.mean, _Call(model, forward)
        expansion = partial(_expansion, call, mean)
        all_indices = list(indices)
        num_weights = sum(value.numel() for value in mean.values())
        size = max(1, min(MAX_SAMPLES_PER_PASS, MAX_ELEMENTS_PER_PASS // num_weights))
        outputs, has_graph = [], torch.is_grad_enabled()
        # Lightning evaluates in inference mode, where torch 2.5 to 2.7 have no batching rule for dual numbers.
        with torch.inference_mode(mode=False), torch.set_grad_enabled(has_graph), _differentiable_attention():
            for start in range(0, len(all_indices), size):
                deviations = self._deviations(all_indices[start : start + size])
                try:
                    outputs.append(expansion(deviations))
                except RuntimeError as error:  # NotImplementedError is a subclass
                    _raise_unsupported(model, forward, partial(expansion, deviations), error)
        columns = iter([torch.cat(column) for column in zip(*outputs, strict=True)])
        at_mean = forward() if call.is_nested else next(columns)
        if not call.is_nested:
            return at_mean
        count = len(all_indices)
        return mapped(lambda leaf: next(columns) if _is_real(leaf) else stacked([leaf] * count), at_mean)

    def scaled(self, scale: float) -> LinearizedSamples:
        """The same samples with the posterior's standard deviations multiplied; see `PosteriorSamples.scaled`."""
        return LinearizedSamples(self.samples.scaled(scale))

    def _deviations(self, indices: list[int]) -> dict[str, Tensor]:
        """θ_s - μ by parameter name, stacked over samples."""
        samples = [self.samples.weights(index) for index in indices]
        mean = self.samples.posterior.mean
        return {name: torch.stack([weights[name] for weights in samples]) - mean[name] for name in mean}


class _Call(nn.Module):
    """A model and a function that calls it, as one module, so that `functional_call` can replace the model's weights."""

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.call, self.is_nested = model, call, False

    def forward(self) -> tuple[Tensor, ...]:
        """The real values of the output."""
        output = self.call()
        self.is_nested = not isinstance(output, Tensor)
        return tuple(leaf for _, leaf in leaves(output) if _is_real(leaf))


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _expansion(call: _Call, mean: dict[str, Tensor], deviations: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """f(x, μ) + J (θ_s - μ), stacked over samples, of each real value."""

    def outputs(weights: dict[str, Tensor]) -> Any:
        return functional_call(call, {f"model.{name}": value for name, value in weights.items()}, ())

    def value_and_change(deviation: dict[str, Tensor]) -> Any:
        return jvp(outputs, (mean,), (deviation,))

    out_dims: Any = (None, 0)  # f(x, μ) does not depend on the sample, so it is computed once
    values, changes = vmap(value_and_change, out_dims=out_dims, randomness="same")(deviations)
    return tuple(value + change for value, change in zip(values, changes, strict=True))


@cache
def _load_derivatives() -> None:
    """Use `torch.func` once, because some torch versions emit a deprecation warning on first use."""
    zero = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        vmap(lambda x: jvp(torch.sin, (x,), (x,)))(zero)


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Context in which attention runs as plain matrix products, the only path with a forward-mode derivative."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _raise_unsupported(
    model: nn.Module, forward: Callable[[], Any], expand: Callable[[], Any], error: RuntimeError
) -> NoReturn:
    """Raise an error that names the layer without a derivative, or the model's own error if `forward` fails too."""
    forward()
    reason = str(error).splitlines()[0].partition(" Please file an issue")[0].rstrip(".")
    layer = _failing_layer(model, expand)
    raise UnsupportedLayerError(
        f"The linearised predictive needs forward-mode derivatives, which {layer} does not support: {reason}. "
        "Predict with sampled weights (linearized=False), or replace this layer."
    ) from error


def _failing_layer(model: nn.Module, expand: Callable[[], Any]) -> str:
    """Name and type of the innermost module that is running when `expand` fails."""
    active: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # which refuses hooks
            continue
        label = f"{name} ({type(module).__name__})" if name else type(module).__name__
        hooks.append(module.register_forward_pre_hook(lambda *_, label=label: active.append(label)))
        hooks.append(module.register_forward_hook(lambda *_: active.pop() and None))
    try:
        expand()
    except RuntimeError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return active[-1] if active else type(model).__name__
