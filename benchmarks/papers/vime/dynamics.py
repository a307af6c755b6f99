"""A Bayesian dynamics model p(s' | s, a), trained on a pool of transitions, and the information gain of a transition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, final

import torch
from torch import Generator, Tensor, nn

from benchmarks.papers.vime.gain import LayerPass, diagonal_gain, matrix_gain
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.optim import BBB, NoisyKFAC, VariationalOptimizer
from lightning_bayes.posteriors import MatrixGaussian

HIDDEN: Final = 32
NOISE_STD: Final = 0.5  # of the likelihood, in standardised states
NUM_DATA: Final = 5000  # N
PRIOR_PRECISION: Final = 4.0  # a standard deviation of .5, as in the released code
LR: Final = 1e-3
GAIN_STEP: Final = 0.01  # α̃
BATCH: Final = 10
POOL: Final = 100_000


class Moves(NamedTuple):
    """Transitions: inputs ``[n, state + action]`` and next states ``[n, state]``."""

    inputs: Tensor
    following: Tensor


def _matrix_variate(model: nn.Module) -> VariationalOptimizer:
    base, likelihood = torch.optim.Adam(model.parameters(), LR), Gaussian(NOISE_STD)  # for the Fisher
    return NoisyKFAC(model, base=base, num_data=NUM_DATA, prior_precision=PRIOR_PRECISION, likelihood=likelihood)


def _mean_field(model: nn.Module) -> VariationalOptimizer:
    return BBB(model, lr=LR, num_data=NUM_DATA, prior_precision=PRIOR_PRECISION, init_precision=100.0)


OPTIMIZERS: Final[dict[str, Callable[[nn.Module], VariationalOptimizer]]] = {"bbb": _mean_field, "mvg": _matrix_variate}


@final
class Dynamics:
    """A network with one hidden layer of 32 ReLUs, trained on a pool with its current standardisation.

    `posterior` is ``"mvg"``, matrix-variate by Noisy K-FAC, or ``"bbb"``, mean-field by Bayes by Backprop.
    """

    def __init__(self, posterior: str, state: int, action: int, seed: int) -> None:
        self.generator, self.state_size = Generator().manual_seed(seed), state
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(state + action, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, state))
        self.optimizer = OPTIMIZERS[posterior](self.net)
        self.pool = Moves(torch.empty(0, state + action), torch.empty(0, state))

    def add(self, moves: Moves) -> None:
        """Add transitions to the pool, which keeps the latest `POOL`."""
        self.pool = Moves(*(torch.cat(pair)[-POOL:] for pair in zip(self.pool, moves, strict=True)))

    def standardised(self, moves: Moves) -> Moves:
        """Standardise inputs with the pool; next states are standardised like states."""
        mean, std = self.pool.inputs.mean(0), self.pool.inputs.std(0).clamp_min(1e-6)
        of_state = slice(self.state_size)
        return Moves((moves.inputs - mean) / std, (moves.following - mean[of_state]) / std[of_state])

    def train(self, updates: int) -> float:
        """Update on batches of the pool; returns the mean squared error of the posterior mean, in standardised units."""
        pool = self.standardised(self.pool)
        for _ in range(updates):
            rows = torch.randint(len(pool.inputs), (BATCH,), generator=self.generator)
            with self.optimizer.sampled_params():
                errors = self.net(pool.inputs[rows]) - pool.following[rows]
                (0.5 * errors.square().sum(1) / NOISE_STD**2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        with torch.no_grad():
            return float((self.net(pool.inputs) - pool.following).square().mean())

    @torch.no_grad()
    def gain(self, moves: Moves) -> Tensor:
        """Information gain of each transition alone in nats, ``[n]``; see `benchmarks.papers.vime.gain`."""
        passes, posterior = self._passes(self.standardised(moves)), self.optimizer.posterior()
        variance = posterior.variance()
        gains = []
        for name, seen in zip(("0", "2"), passes, strict=True):
            if isinstance(posterior, MatrixGaussian):
                left, right = (
                    torch.cholesky_inverse(torch.linalg.cholesky(f)) for f in posterior.factors[f"{name}.weight"]
                )
                gains.append(matrix_gain(seen, left, right, GAIN_STEP))
            else:
                both = torch.cat([variance[f"{name}.weight"], variance[f"{name}.bias"][:, None]], 1)
                gains.append(diagonal_gain(seen, both, GAIN_STEP))
        return torch.stack(gains).sum(0)

    def _passes(self, moves: Moves) -> list[LayerPass]:
        """The passes through both layers at the posterior mean."""
        first, _, last = self.net
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        before = first(moves.inputs)
        hidden = before.relu()
        of_outputs = (moves.following - last(hidden)) / NOISE_STD**2
        unit = torch.eye(self.state_size).expand(len(hidden), -1, -1) / NOISE_STD
        back = (before > 0).float()
        to_hidden = unit @ last.weight * back[:, None]
        return [
            LayerPass(_with_one(moves.inputs), of_outputs @ last.weight * back, to_hidden),
            LayerPass(_with_one(hidden), of_outputs, unit),
        ]


def _with_one(inputs: Tensor) -> Tensor:
    return nn.functional.pad(inputs, (0, 1), value=1.0)
