"""The linearised predictive: the model's first-order expansion around the posterior mean, under weight samples.

    f_lin(x, θ) = f(x, μ) + J(x) (θ - μ)        J(x) = ∂f(x, θ)/∂θ at μ

For Gaussian weights the outputs are Gaussian with mean f(x, μ) and covariance J Σ Jᵀ, as in Immer et al. 2021,
https://arxiv.org/abs/2008.08217. Sampled weights that lie far from μ give networks that compute nothing; the expansion stays
sensible under wide posteriors. Products with J come from forward-mode differentiation (`torch.func.jvp`): no Jacobian is
formed, and f(x, μ) is computed once for several samples.
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
from lightning_bayes.predictive.samples import PosteriorSamples, Samples, require_tensor

TOGETHER = 16  # samples in one pass at most
TOGETHER_ELEMENTS = 2**24  # numbers in the directions of one pass at most: 64 MiB of float32


@final
class LinearizedSamples(Samples):
    """S weight samples, each seen through the model's linearisation at the posterior mean.

    A model with a layer that has no forward-mode derivative raises an `UnsupportedLayerError` that names the layer.

    Args:
        samples: The weight samples.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(2, 1, bias=False)
        >>> q = MeanField({"weight": torch.zeros(1, 2)}, {"weight": torch.ones(1, 2)}, {"weight": 1.0}, num_data=1)
        >>> samples, x = PosteriorSamples(q, count=3), torch.ones(4, 2)
        >>> linear = LinearizedSamples(samples).outputs(model, lambda: model(x))
        >>> torch.equal(linear, samples.outputs(model, lambda: model(x)))  # this model is linear in its weights
        True
    """

    def __init__(self, samples: PosteriorSamples) -> None:
        self.samples, self.count = samples, samples.count

    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` once for each group of samples; see `Samples.chosen`.

        Args:
            model: The model, in evaluation mode; its own weights do not matter.
            forward: Computes the model's output.
            indices: Numbers of the samples.

        Returns:
            f(x, μ) + J (θ_s - μ), stacked over the samples.
        """
        _load_derivatives()
        mean = self.samples.posterior.mean
        expansion = partial(_expansion, _Call(model, forward), mean)
        numbers = list(indices)
        size = max(1, min(TOGETHER, TOGETHER_ELEMENTS // sum(value.numel() for value in mean.values())))
        parts = []
        # In inference mode, in which Lightning evaluates, torch 2.5 to 2.7 have no batching rule for dual numbers.
        with torch.inference_mode(mode=False), torch.no_grad(), _differentiable_attention():
            for start in range(0, len(numbers), size):
                away = self._away(numbers[start : start + size])
                try:
                    parts.append(expansion(away))
                except RuntimeError as error:  # NotImplementedError is one
                    _refuse(model, forward, partial(expansion, away), error)
        return torch.cat(parts)

    def scaled(self, scale: float) -> LinearizedSamples:
        """The same samples at another width of the posterior; see `PosteriorSamples.scaled`."""
        return LinearizedSamples(self.samples.scaled(scale))

    def _away(self, indices: list[int]) -> dict[str, Tensor]:
        """θ_s - μ by parameter name, stacked over samples."""
        weights = [self.samples.weights(index) for index in indices]
        mean = self.samples.posterior.mean
        return {name: torch.stack([each[name] for each in weights]) - mean[name] for name in mean}


class _Call(nn.Module):
    """A model together with the call that uses it, so that `functional_call` can replace the model's weights."""

    def __init__(self, model: nn.Module, call: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self) -> Tensor:
        return require_tensor(self.model, self.call())


def _expansion(call: _Call, mean: dict[str, Tensor], away: dict[str, Tensor]) -> Tensor:
    def outputs(weights: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(call, {f"model.{name}": value for name, value in weights.items()}, ())
        return result

    def one(direction: dict[str, Tensor]) -> Any:
        return jvp(outputs, (mean,), (direction,))

    once_and_each: Any = (None, 0)  # f(x, μ) does not depend on the sample, so it is computed once
    value, change = vmap(one, out_dims=once_and_each, randomness="same")(away)
    total: Tensor = value + change
    return total


@cache
def _load_derivatives() -> None:
    """Use `torch.func` once: some versions of torch then compile decompositions, with a deprecation warning of their own."""
    zero = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        vmap(lambda x: jvp(torch.sin, (x,), (x,)))(zero)


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Inside, attention takes the path of plain matrix products, which alone has a forward-mode derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _refuse(
    model: nn.Module, forward: Callable[[], Tensor], expand: Callable[[], Tensor], error: RuntimeError
) -> NoReturn:
    """Name the layer that cannot be differentiated; a model that fails without derivatives too raises its own error."""
    forward()
    reason = str(error).splitlines()[0].partition(" Please file an issue")[0].rstrip(".")
    layer = _failing(model, expand)
    raise UnsupportedLayerError(
        f"The linearised predictive needs forward-mode derivatives, which {layer} does not give: {reason}. "
        "Predict with sampled weights (linearized=False), or replace this layer."
    ) from error


def _failing(model: nn.Module, expand: Callable[[], Tensor]) -> str:
    """Name and type of the innermost module in which a pass breaks off."""
    active: list[str] = []
    hooks = []
    for name, module in model.named_modules():
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
