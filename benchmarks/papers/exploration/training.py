"""DDPG (Lillicrap et al. 2016) of all methods and seeds at once; each run has its own environment, weights and transitions.

At each time step one θ is sampled per run. It acts, and the gradient of the actor is taken at it; targets and tests use μ.
All methods use the same random numbers for a seed: initial weights, ε, and the transitions in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Generator, Tensor

from benchmarks.papers.exploration.environments import Environments
from benchmarks.papers.exploration.explorers import METHODS, Explorer
from benchmarks.papers.exploration.networks import Sizes, act, initial_weights, value
from benchmarks.papers.exploration.replay import Replay, Transitions
from benchmarks.papers.exploration.setting import BATCH, Setting

_TEST_SEED = 10_000


@dataclass
class Curve:
    """Results of one method.

    Attributes:
        steps: Time steps before each test.
        returns: Mean return over the episodes of a test, ``[tests][seeds]``.
        noise: Median σ at each test; 0 without noise.
        actors: Final μ of every seed.
    """

    steps: list[int] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    actors: Tensor = field(default_factory=lambda: torch.empty(0))


@final
class Learner:
    """All runs, method by method: run ``i·seeds + j`` is seed j of method i.

    Args:
        methods: Keys of `METHODS`.
        setting: Settings shared by all methods.
    """

    def __init__(self, methods: Sequence[str], setting: Setting) -> None:
        self.setting, self.methods = setting, list(methods)
        seeds = list(range(setting.seeds)) * len(methods)
        self.environments = Environments(setting.environment, seeds)
        self.sizes = Sizes(*self.environments.sides, setting.hidden)
        starts = [Generator().manual_seed(seed) for seed in range(setting.seeds)]
        actors = torch.stack([initial_weights(self.sizes.actor, start) for start in starts])
        critics = torch.stack([initial_weights(self.sizes.critic, start) for start in starts])
        self.explorers: list[Explorer] = [METHODS[name].explorer(actors.clone()) for name in methods]
        self.critic = critics.repeat(len(methods), 1).requires_grad_()
        self.critic_optimizer = torch.optim.Adam([self.critic], lr=setting.critic_lr, fused=True)
        self.target_critic, self.target_actor = self.critic.detach().clone(), self.means().clone()
        self.replay = Replay(len(seeds), setting.steps, *self.environments.sides)
        self._draws, self._rows = Generator().manual_seed(1), Generator().manual_seed(0)  # shared by all methods
        self.observations = self.environments.reset_all()

    def means(self) -> Tensor:
        """μ of every run, ``[R, P]``."""
        return torch.cat([explorer.mean for explorer in self.explorers])

    def step(self) -> None:
        """Run one time step of every run, and an update once there is a batch."""
        epsilon = torch.randn(self.explorers[0].mean.shape, generator=self._draws)
        weights = torch.cat([explorer.draw(epsilon) for explorer in self.explorers])
        self._act(weights)
        if self.replay.length >= BATCH:
            self._update(weights, epsilon)

    def _act(self, weights: Tensor) -> None:
        with torch.no_grad():
            actions = act(weights, self.sizes, self.observations[:, None])[:, 0]
        outcome = self.environments.step(actions)
        self.replay.add(self.observations, actions, outcome.rewards, outcome.terminated, outcome.observations)
        self.observations = outcome.observations.clone()
        for i, ended in enumerate(outcome.ended):
            if ended:
                self.observations[i] = self.environments.reset(i)

    def _update(self, weights: Tensor, epsilon: Tensor) -> None:
        rows = torch.randint(self.replay.length, (self.setting.seeds, BATCH), generator=self._rows)
        batch = self.replay.at(rows.repeat(len(self.methods), 1))
        self._update_critic(batch)
        weights = weights.requires_grad_()
        actions = act(weights, self.sizes, batch.observations)
        loss = -value(self.critic.detach(), self.sizes, batch.observations, actions).mean(1).sum()
        (grads,) = torch.autograd.grad(loss, [weights])
        parts = grads.split(self.setting.seeds)
        for explorer, grad in zip(self.explorers, parts, strict=True):
            explorer.update(grad, epsilon)
        self.target_actor.lerp_(self.means(), self.setting.target_rate)
        self.target_critic.lerp_(self.critic.detach(), self.setting.target_rate)

    def _update_critic(self, batch: Transitions) -> None:
        with torch.no_grad():
            following = act(self.target_actor, self.sizes, batch.following)
            future = value(self.target_critic, self.sizes, batch.following, following)
            targets = batch.rewards + self.setting.discount * (1 - batch.terminated) * future
        errors = value(self.critic, self.sizes, batch.observations, batch.actions) - targets
        (self.critic.grad,) = torch.autograd.grad(errors.square().mean(1).sum(), [self.critic])
        self.critic_optimizer.step()


def mean_returns(weights: Tensor, sizes: Sizes, environments: Environments, episodes: int) -> Tensor:
    """Undiscounted return of each policy, without noise.

    Args:
        weights: Weights of the actors, ``[R, P]``.
        sizes: Sizes of the networks.
        environments: ``R·episodes`` copies, ordered by run.
        episodes: Episodes per run.

    Returns:
        Means over episodes, ``[R]``.
    """
    observations = environments.reset_all()
    total, runs = torch.zeros(len(observations)), torch.ones(len(observations))
    while runs.any():
        with torch.no_grad():
            actions = act(weights, sizes, observations.unflatten(0, (-1, episodes))).flatten(0, 1)
        outcome = environments.step(actions)
        total += runs * outcome.rewards
        for i in (i for i, ended in enumerate(outcome.ended) if ended):
            runs[i] = 0
            environments.reset(i)
        observations = outcome.observations
    return total.unflatten(0, (-1, episodes)).mean(1)


def train(methods: Sequence[str], setting: Setting) -> Iterator[dict[str, Curve]]:
    """Train and test.

    Args:
        methods: Keys of `METHODS`.
        setting: Settings shared by all methods.

    Yields:
        Results so far by method, after each test.
    """
    learner = Learner(methods, setting)
    test_seeds = [_TEST_SEED + seed for seed in range(setting.seeds * setting.test_episodes)] * len(methods)
    tests = Environments(setting.environment, test_seeds)
    curves = {name: Curve() for name in methods}
    for number in range(1, setting.steps + 1):
        learner.step()
        if number % setting.test_every == 0 or number == setting.steps:
            returns = mean_returns(learner.means(), learner.sizes, tests, setting.test_episodes)
            _note(curves, learner, number, returns)
            yield curves
    tests.close()
    learner.environments.close()


def _note(curves: dict[str, Curve], learner: Learner, number: int, returns: Tensor) -> None:
    method_returns = returns.split(learner.setting.seeds)
    for curve, explorer, seed_returns in zip(curves.values(), learner.explorers, method_returns, strict=True):
        precision = explorer.precision()
        curve.steps.append(number)
        curve.returns.append(seed_returns.tolist())
        curve.noise.append(0.0 if precision is None else precision.rsqrt().median().item())
        curve.actors = explorer.mean.clone()
