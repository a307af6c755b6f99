r"""DDPG as a LightningModule with automatic optimization, which `VadamCallback` trains without changes.

Two optimizers would require manual optimization. One optimizer with a group per network is equivalent, because the loss is
the sum of two terms that share no weights: the error of the critic, and -Q with the critic's weights detached. The
environment steps at the start of `training_step`, so the callback's weight sample acts and gives the gradient.
`on_train_batch_end`, where the weights are the mean, updates the target networks. The loader's "batches" are time steps.

    VadamCallback(bayesian=r"^actor\.", lr=1e-4, num_data=NUM_DATA, max_noise=MAX_NOISE, eval_samples=0, ...)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

from benchmarks.papers.exploration.environments import Environments
from benchmarks.papers.exploration.explorers import BETAS, LR
from benchmarks.papers.exploration.replay import Replay
from benchmarks.papers.exploration.setting import BATCH, MAX_NOISE, NUM_DATA, Setting
from lightning_bayes import VadamCallback


class Critic(nn.Module):
    """Q(s, a); the action enters the second layer."""

    def __init__(self, observation: int, action: int, hidden: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(observation, hidden[0]), nn.Linear(hidden[0] + action, hidden[1])
        self.last = nn.Linear(hidden[1], 1)

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Values ``[B]``."""
        x = self.first(observations).relu()
        values: Tensor = self.last(self.second(torch.cat([x, actions], -1)).relu())
        return values[:, 0]


def make_actor(observation: int, action: int, hidden: tuple[int, int]) -> nn.Sequential:
    """The policy, with actions between -1 and 1."""
    first, second = hidden
    layers = [nn.Linear(observation, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, action)]
    return nn.Sequential(*layers, nn.Tanh())


class TimeSteps(Dataset[Tensor]):
    """Indices of time steps; the data come from the environment."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        """The number of time steps."""
        return self.steps

    def __getitem__(self, number: int) -> Tensor:
        """The index of a time step."""
        return torch.tensor(number)


class DDPG(LightningModule):
    """DDPG on a gymnasium environment.

    Args:
        setting: The setting; only the benchmark uses ``seeds`` and the test settings.
        seed: Seed of the environment and of the batches.
    """

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        super().__init__()
        self.setting = setting
        self.environment = Environments(setting.environment, [seed])
        sides = self.environment.sides
        self.actor, self.critic = make_actor(*sides, setting.hidden), Critic(*sides, setting.hidden)
        self.target_actor, self.target_critic = (
            copy.deepcopy(network).requires_grad_(False) for network in (self.actor, self.critic)
        )
        self.replay = Replay(1, setting.steps, *sides)
        self.generator = torch.Generator().manual_seed(seed)
        self.observation = self.environment.reset_all()
        self.returns = [0.0]  # of all episodes, including the running one

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        """Act with the current weights, and return the loss of both networks once there is a batch."""
        self._act()
        if self.replay.length < BATCH:
            return None
        rows = torch.randint(self.replay.length, (1, BATCH), generator=self.generator)
        observations, actions, rewards, terminated, following = (part[0] for part in self.replay.at(rows))
        with torch.no_grad():
            future = self.target_critic(following, self.target_actor(following))
            targets = rewards + self.setting.discount * (1 - terminated) * future
        critic_loss = (self.critic(observations, actions) - targets).square().mean()
        detached = {name: param.detach() for name, param in self.critic.named_parameters()}
        values: Tensor = functional_call(self.critic, detached, (observations, self.actor(observations)))
        return critic_loss - values.mean()

    def _act(self) -> None:
        with torch.no_grad():
            actions = self.actor(self.observation)
        outcome = self.environment.step(actions)
        self.replay.add(self.observation, actions, outcome.rewards, outcome.terminated, outcome.observations)
        self.observation = outcome.observations
        self.returns[-1] += outcome.rewards.item()
        if outcome.ended[0]:
            self.observation = self.environment.reset_all()
            self.returns.append(0.0)

    def on_train_start(self) -> None:
        """Restore the critic's learning rate: a callback with an explicit `lr` sets it for every group."""
        optimizer = self.trainer.optimizers[0]
        optimizer.param_groups[1]["lr"] = self.setting.critic_lr

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        """Move the target networks towards the posterior means."""
        for target, network in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
            torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), self.setting.target_rate)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with a group per network."""
        groups = [
            {"params": self.actor.parameters(), "lr": LR},
            {"params": self.critic.parameters(), "lr": self.setting.critic_lr},
        ]
        return torch.optim.Adam(groups, betas=BETAS)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """One batch per time step."""
        return DataLoader(TimeSteps(self.setting.steps), batch_size=1)


def vadam_callback(**overrides: Any) -> VadamCallback:
    """Vadam for the actor only, with the published setting."""
    published = {
        "bayesian": r"^actor\.",
        "lr": LR,
        "betas": BETAS,
        "num_data": NUM_DATA,
        "prior_precision": 1e-8,
        "init_precision": 1e-8,
        "max_noise": MAX_NOISE,
        "eval_samples": 0,
    }
    return VadamCallback(**{**published, **overrides})
