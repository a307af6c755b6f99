"""Values with Gaussian noise that the network predicts, y ~ N(μ, v), the second output s a form of v.

    form            v           ∂v/∂s / (√2 v), the root of its curvature
    variance        s           1 / (√2 s)
    log_variance    exp s       1 / √2
    std             s²          √2 / s
    log_std         exp 2s      √2

Mean and variance are orthogonal, and H of the mean is 1/v. The mixture over samples has the mean E_s μ_s and, by the law of
total variance, the variance E_s v_s + Var_s μ_s. `combine` returns them in the form of one output. An average of raw outputs
would leave out Var_s μ_s, and average log-variances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, final, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.distributions import Normal
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood.base import OutputLikelihood, flattened, num_samples, one_output
from lightning_bayes.likelihood.mixtures import observed
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.likelihood.predictions import Observed

FormName: TypeAlias = Literal["variance", "log_variance", "std", "log_std", "softplus_variance", "softplus_std"]


class Form(NamedTuple):
    """How an output states the variance."""

    read: Callable[[Tensor], Tensor]  # to the variance
    write: Callable[[Tensor], Tensor]  # from it
    root: Callable[[Tensor], Tensor]  # of the curvature: ∂v/∂s / (√2 v)


def _inverse_softplus(value: Tensor) -> Tensor:
    return value + (-(-value).expm1()).log()


FORMS: Final[dict[str, Form]] = {
    "variance": Form(lambda s: s, lambda v: v, lambda s: 0.5**0.5 / s),
    "log_variance": Form(torch.exp, torch.log, lambda s: torch.full_like(s, 0.5**0.5)),
    "std": Form(torch.square, torch.sqrt, lambda s: 2**0.5 / s),
    "log_std": Form(lambda s: (2 * s).exp(), lambda v: v.log() / 2, lambda s: torch.full_like(s, 2**0.5)),
    "softplus_variance": Form(F.softplus, _inverse_softplus, lambda s: s.sigmoid() * 0.5**0.5 / F.softplus(s)),
    "softplus_std": Form(
        lambda s: F.softplus(s).square(),
        lambda v: _inverse_softplus(v.sqrt()),
        lambda s: s.sigmoid() * 2**0.5 / F.softplus(s),
    ),
}
_LEAST: Final = 1e-12  # variance


@final
class PredictedGaussian(OutputLikelihood):
    """A mean and its noise for each target.

    Outputs are one tensor ``[…, 2 k]``, the means of k targets and then their variances, or a pair of tensors. Targets are
    ``[…, k]``; for k = 1 in one tensor, ``[…]``.

    Args:
        form: How the second half or tensor states the variance.

    Raises:
        HyperparameterError: If the form is unknown.
    """

    name: ClassVar[str] = "predicted_gaussian"
    cases = ((lambda: PredictedGaussian("log_variance"), (4,)), (lambda: PredictedGaussian("softplus_std"), (2,)))

    def __init__(self, form: FormName = "variance") -> None:
        if form not in FORMS:
            raise HyperparameterError(f"form={form!r} is unknown; use {', '.join(map(repr, get_args(FormName)))}.")
        self.form = form

    @property
    def has_noise(self) -> bool:
        """The network predicts it."""
        return True

    def mean(self, outputs: Any) -> Tensor:
        """The first half, or the first tensor."""
        return split(outputs)[0]

    def distribution(self, outputs: Any) -> Normal:
        """N(μ, v) of each target."""
        mean, second = split(outputs)
        variance = FORMS[self.form].read(second).clamp_min(_LEAST).expand_as(mean)
        return Normal(mean, variance.sqrt(), validate_args=False)

    @override
    def log_prob(self, outputs: Any, targets: Tensor) -> Tensor:
        normal = self.distribution(outputs)
        log_prob: Tensor = normal.log_prob(shaped_like(targets, normal.mean))  # type: ignore[no-untyped-call]
        return log_prob

    def target_shape(self, outputs: Any, targets: Tensor) -> tuple[int, ...]:
        """One target for each mean."""
        mean = split(outputs)[0]
        return tuple(mean.shape if mean.numel() == targets.numel() else targets.shape)

    def joined(self, outputs: Any) -> Tensor:
        """Mean and what states the variance beside each other in the last dimension."""
        if isinstance(outputs, Tensor):
            return outputs
        mean, second = split(outputs)
        columns = [part.unsqueeze(-1) if mean.dim() == 1 else part for part in (mean, second.expand_as(mean))]
        return torch.cat(columns, -1)

    def over_outputs(self, values: Tensor, outputs: Tensor) -> Tensor:
        """The same value for the mean and the variance of a target."""
        half = values.reshape(outputs.chunk(2, -1)[0].shape)
        return torch.cat([half, half], -1)

    def combine(self, outputs: Any) -> Any:
        """Mean and variance of the mixture, in the form of one output."""
        form, is_one = FORMS[self.form], isinstance(outputs, Tensor)
        means, second = outputs.chunk(2, -1) if is_one else outputs
        variance = form.write(form.read(second).mean(0) + means.var(0, correction=0))
        return torch.cat([means.mean(0), variance], -1) if is_one else type(outputs)([means.mean(0), variance])

    def summarise(self, outputs: Any, interval: float = 0.9) -> Observed:
        """Mean, both variances and the interval of the targets."""
        flat = flattened(outputs)
        return observed(self.distribution(flat), num_samples(outputs), interval)

    def sample(self, outputs: Any, generator: Generator) -> Tensor:
        """Draw a target around each mean."""
        normal = self.distribution(mapped(Tensor.detach, outputs))
        noise = torch.randn(normal.mean.shape, generator=generator, device=normal.mean.device, dtype=normal.mean.dtype)
        return normal.mean + normal.stddev * noise

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """1/√v of one mean, or the root of one variance's curvature; of one tensor ``[…, 2 k]``."""
        form, (mean, second) = FORMS[self.form], outputs.chunk(2, -1)
        of_mean = form.read(second).clamp_min(_LEAST).rsqrt().expand_as(mean)
        return one_output(torch.cat([of_mean, form.root(second)], -1), index)


def has_halves(outputs: Any) -> bool:
    """Whether an output is a pair of tensors, or has an even number of columns."""
    if isinstance(outputs, Tensor):
        return outputs.dim() > 0 and outputs.shape[-1] % 2 == 0
    return isinstance(outputs, (tuple, list)) and len(outputs) == 2 and all(isinstance(x, Tensor) for x in outputs)


def split(outputs: Any) -> tuple[Tensor, Tensor]:
    """The mean, and what states the variance."""
    if has_halves(outputs):
        if not isinstance(outputs, Tensor):
            return outputs[0], outputs[1]
        one, other = outputs.chunk(2, -1)
        return (one.squeeze(-1), other.squeeze(-1)) if one.shape[-1] == 1 else (one, other)
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ShapeError(
        f"A mean and a variance need a pair of tensors, or a tensor of an even number of columns, got {shape}."
    )


def shaped_like(targets: Tensor, mean: Tensor) -> Tensor:
    """Targets in the shape of the means; ``[B, 1]`` becomes ``[B]``, for example."""
    if targets.numel() != mean.numel():
        raise ShapeError(
            f"{mean.numel()} means {list(mean.shape)} have targets {list(targets.shape)}: one each is needed."
        )
    return targets.reshape(mean.shape)


def form_of(second: Tensor, variance: Tensor) -> FormName | None:
    """The form in which an output states these variances; None for another."""
    for name in get_args(FormName):
        read = FORMS[name].read(second)
        if read.shape == variance.shape and torch.allclose(read, variance.to(read.dtype), rtol=1e-3, atol=2e-6):
            form: FormName = name
            return form
    return None
