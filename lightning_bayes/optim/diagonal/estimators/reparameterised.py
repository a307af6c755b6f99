"""ĥ = ĝ (θ - μ) / Σ, an estimate of E_q[diag ∇²f] from a gradient and its noise (Price's theorem)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn

from lightning_bayes.optim.diagonal.estimators.estimator import CurvatureEstimator
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass


def reparameterised(grad: Tensor, sample: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """ĝ (θ - μ) / Σ, Khan et al. 2018 App. D.1; pure.

    Args:
        grad: ĝ, mean gradient at the sample.
        sample: θ.
        mean: μ.
        precision: 1/Σ that θ was drawn with.

    Returns:
        An estimate of the Hessian's diagonal, averaged over q.
    """
    return grad * (sample - mean) * precision


@final
class Reparameterised(CurvatureEstimator):
    """Reads gradient and noise of a pass.

    A pass without noise says nothing about the curvature; its squared gradient times the number of its examples takes the
    place, as if it were the mean of independent gradients of mean zero.
    """

    def read(
        self, finished: FinishedPass, params: Sequence[nn.Parameter], precision: Callable[[nn.Parameter], Tensor]
    ) -> Curvature:
        """Read one pass; see `CurvatureEstimator`."""
        found: Curvature = {}
        for param, grad in finished.gradients(params).items():
            mean = finished.means.get(param)
            if mean is None:
                found[param] = grad.square_().mul_(finished.num_examples)
            else:
                found[param] = reparameterised(grad, param.detach(), mean, precision(param))
        return found
