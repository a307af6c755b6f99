"""What a pass measured: the mean gradient and the mean curvature, by parameter.

The one scale convention of this package: every measurement is a **mean over examples of the per-example quantity**, for
the loss without the prior. With g_i the gradient of example i's negative log-likelihood (nats),

    grad = (1/n) Σ_i g_i        squared_gradients = (1/n) Σ_i g_i²        (element-wise; the empirical Fisher's diagonal)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

Quantity: TypeAlias = Literal["squared_gradients"]


@dataclass(frozen=True)
class Measurement:
    """The result of `measure`.

    Attributes:
        loss: The closure's loss, detached, a scalar in the closure's own scale.
        grad: Mean gradient of each trainable parameter by name, shaped like the parameter.
        curvature: Mean of the per-example quantity by name, shaped like the parameter.
        num_examples: n, the number of examples that counted in the loss.
    """

    loss: Tensor
    grad: dict[str, Tensor]
    curvature: dict[str, Tensor]
    num_examples: int
