"""Bayesian logistic regression with a mean-field Gaussian: ELBO, predictions and optimum by quadrature.

Under q = N(μ, diag 1/P) the logit of an example is N(xᵀμ, Σ_d x_d²/P_d), so expectations are one-dimensional. Gauss-Hermite
quadrature with 20 nodes is more precise than any figure shows. "MF-exact" is the minimum of the negative ELBO by L-BFGS. In
all functions the leading dimension holds independent runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.errors import DatasetError

FILES = {
    "usps": "usps_3vs5.npz",
    "breast-cancer": "breast-cancer_scale.npz",
    "australian": "australian_scale.npz",
    "a1a": "a1a.npz",
}
PRIOR_PRECISION = {"toy": 0.01, "usps": 25.0, "breast-cancer": 1.0, "australian": 1e-5, "a1a": 2.8072}  # the papers' λ


class Runs(NamedTuple):
    """Data of R runs: features ``[R, N, D]``, labels ``[R, N]``."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    prior_precision: float

    @property
    def num_data(self) -> int:
        """N, the size of a training set."""
        return self.train_x.shape[1]


def load(name: str, root: Path | None, runs: int, *, same_split: bool = False) -> Runs:
    """Load a data set."""
    generator = np.random.default_rng(0)
    if name == "toy":
        draws = [(*murphys_toy(30, generator), *murphys_toy(300, generator))]
    elif name == "a1a":
        arrays = read(name, root, ("X_tr", "y_tr", "X_te", "y_te"))
        draws = [(with_ones(arrays[0]), arrays[1], with_ones(arrays[2]), arrays[3])]
    else:
        x, y = read(name, root, ("X", "y"))
        draws = [halves(with_ones(x), y, generator) for _ in range(1 if same_split else runs)]
    stacked = [torch.as_tensor(np.stack(part), dtype=torch.float32) for part in zip(*draws, strict=True)]
    return Runs(*(part.expand(runs, *part.shape[1:]) for part in stacked), prior_precision=PRIOR_PRECISION[name])


def murphys_toy(count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` points of N((1, 5), 1) with label 1, and of N((-5, 1), 2.2²) with label 0."""
    ones = generator.normal((1, 5), 1.0, (count, 2))
    zeros = generator.normal((-5, 1), 2.2, (count, 2))
    return np.concatenate([ones, zeros]), np.repeat([1.0, 0.0], count)


def read(name: str, root: Path | None, arrays: tuple[str, ...]) -> list[np.ndarray]:
    """Read arrays of a data set by name."""
    path = (root or Path()) / FILES[name]
    if root is None or not path.is_file():
        raise DatasetError(
            f"The data set {name!r} is not at {path}. Pass --root with the folder of {', '.join(FILES.values())} (npz files "
            f"of LIBSVM's sets and of USPS; this one with the arrays {', '.join(arrays)}), or --sets toy."
        )
    with np.load(path) as content:
        missing = [array for array in arrays if array not in content]
        if missing:
            raise DatasetError(f"{path} has no {', '.join(missing)}; it has {', '.join(content)}.")
        return [np.asarray(content[array], dtype=np.float64) for array in arrays]


def with_ones(x: np.ndarray) -> np.ndarray:
    """Append a column of ones, for the bias."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def halves(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """A random half for training and the other for testing."""
    order = generator.permutation(len(x))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return x[train], y[train], x[test], y[test]


_NODES, _WEIGHTS = (torch.as_tensor(v) for v in np.polynomial.hermite_e.hermegauss(20))
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def _logits(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Logits at the quadrature nodes, ``[R, N, nodes]``, in float64."""
    centre, std = _project(x, mean), _project(x.square(), variance).sqrt()
    return centre[..., None] + std[..., None] * _NODES


def _project(x: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(x.dtype)
    is_shared = x.stride(0) == 0  # one data set for all runs
    return ((x[0] @ weights.T).T if is_shared else torch.einsum("rnd,rd->rn", x, weights)).double()


def negative_elbo(data: Runs, mean: Tensor, precision: Tensor) -> Tensor:
    """E_q[Σ_i ℓ_i] + KL(q ‖ prior) per training example in nats, ``[R]``, of q with mean and precision ``[R, D]``."""
    mean, precision = mean.double(), precision.double()
    logits = _logits(data.train_x, mean, 1 / precision)
    nll = (F.softplus(logits) - data.train_y.double()[..., None] * logits) @ _WEIGHTS
    ratio = data.prior_precision / precision
    kl = 0.5 * (ratio + data.prior_precision * mean.square() - 1 - ratio.log()).sum(1)
    return (nll.sum(1) + kl) / data.num_data


def log_loss(data: Runs, mean: Tensor, precision: Tensor) -> Tensor:
    """Test log-loss of the predictive E_q[p(y | x, θ)] in bits per example, ``[R]``; P is infinite for a point estimate."""
    p = _logits(data.test_x, mean, 1 / precision).sigmoid() @ _WEIGHTS
    p_of_label = torch.where(data.test_y > 0.5, p, 1 - p).clamp_min(torch.finfo(p.dtype).tiny)
    return -p_of_label.log2().mean(1)


def symmetric_kl(mean: Tensor, precision: Tensor, other_mean: Tensor, other_precision: Tensor) -> Tensor:
    """KL(q ‖ q') + KL(q' ‖ q) of diagonal Gaussians, in nats."""
    mean, precision, other_mean, other_precision = (t.double() for t in (mean, precision, other_mean, other_precision))
    ratio = precision / other_precision
    distance = (precision + other_precision) * (mean - other_mean).square()
    return 0.5 * (ratio + 1 / ratio - 2 + distance).sum(1)


def mean_field_optimum(data: Runs, evaluations: int = 500) -> tuple[Tensor, Tensor]:
    """MF-exact: mean and precision ``[R, D]`` that minimise the negative ELBO, by L-BFGS with the paper's limit."""
    optima = [
        _optimum(Runs(*(t[r : r + 1].double() for t in data[:4]), data.prior_precision), evaluations)
        for r in range(len(data.train_x))
    ]
    return torch.cat([mean for mean, _ in optima]), torch.cat([precision for _, precision in optima])


def _optimum(data: Runs, evaluations: int) -> tuple[Tensor, Tensor]:
    mean = torch.zeros(1, data.train_x.shape[2], dtype=torch.float64, requires_grad=True)
    log_std = torch.full_like(mean, -0.5 * math.log(data.num_data / 10 + data.prior_precision), requires_grad=True)
    lbfgs = torch.optim.LBFGS(
        [mean, log_std],
        max_iter=evaluations,
        max_eval=evaluations,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = negative_elbo(data, mean, (-2 * log_std).exp()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    lbfgs.step(closure)
    return mean.detach(), (-2 * log_std).exp().detach()
