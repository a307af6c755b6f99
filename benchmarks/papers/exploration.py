"""DDPG with noise in the actor's weights, Khan et al. 2018, Figures 3, 5 and 6.

    python -m benchmarks.papers.exploration [--environment HalfCheetah-v5] [--methods vadam adam_plain] [--seeds 5]
        [--steps 3000000] [--hidden 400 300] [--json FILE]

At each time step one θ is sampled. It acts, and the gradient of the actor is taken at it; tests and target networks use the
mean. The authors' code sums the gradient over the batch of 64: with N = 64² the package's optimizers, which average, are
equivalent. Their exploring SGD and Adam also step on the precision, where the gradient is about 5e-7; here σ stays .01.

JSON is written after each test; finished runs are skipped. Half-Cheetah needs ``gymnasium[mujoco]``, of the extra ``bench``.
On one core, the default 100,000 steps with two layers of 64 units take 5 to 10 minutes a run; the paper's 3,000,000 steps
with 400 and 300 units take about a day.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from benchmarks.over_seeds import standard_error, with_error
from benchmarks.papers import PUBLISHED
from benchmarks.provenance import save_json, saved_rows
from lightning_bayes import VadaGrad, Vadam

BATCH: Final = 64  # M
DISCOUNT, TARGET_RATE, CRITIC_LR, STD = 0.99, 1e-3, 1e-3, 1e-2
Row = dict[str, Any]
# Mean test return so far and its standard error over the ten released runs, after 300,000 and after 3,000,000 steps.
RELEASED: Final = PUBLISHED["khan2018_exploration"]


def explorer(method: str, actor: nn.Module, seed: int) -> tuple[Optimizer, Callable[[], AbstractContextManager[Any]]]:
    """The actor's optimizer, and the context in which its weights are a sample."""
    shared: dict[str, Any] = {"num_data": BATCH**2, "prior_precision": 1e-8, "loss_reduction": "mean", "seed": seed}
    if "_" not in method:
        vadam: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "init_precision": 1e-8, "max_noise": STD}
        vadagrad: dict[str, Any] = {"lr": 1e-2, "betas": (0.0, 0.99), "init_precision": 1e4}
        noisy = Vadam(actor, **vadam, **shared) if method == "vadam" else VadaGrad(actor, **vadagrad, **shared)
        return noisy, noisy.sampled_params
    name, kind = method.split("_")
    plain = Adam(actor.parameters(), 1e-4) if name == "adam" else SGD(actor.parameters(), 1e-4 * BATCH)
    generator = torch.Generator().manual_seed(seed)
    return plain, nullcontext if kind == "plain" else lambda: perturbed(actor, generator)


@contextmanager
def perturbed(actor: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Weights with noise of the standard deviation `STD` inside, and without it again after."""
    means = [param.detach().clone() for param in actor.parameters()]
    try:
        for param in actor.parameters():
            param.data += STD * torch.randn(param.shape, generator=generator)
        yield
    finally:
        for param, mean in zip(actor.parameters(), means, strict=True):
            param.data = mean


def last_layer(inputs: int, outputs: int) -> nn.Linear:
    """A layer uniform within ±.003, as in Lillicrap et al. 2016."""
    layer = nn.Linear(inputs, outputs)
    for param in layer.parameters():
        nn.init.uniform_(param, -3e-3, 3e-3)
    return layer


def make_actor(observation: int, action: int, hidden: list[int]) -> nn.Sequential:
    """Actions between -1 and 1."""
    first, second = nn.Linear(observation, hidden[0]), nn.Linear(hidden[0], hidden[1])
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last_layer(hidden[1], action), nn.Tanh())


@final
class Critic(nn.Module):
    """Q(s, a), ``[batch, 1]``; the action enters the second layer."""

    def __init__(self, observation: int, action: int, hidden: list[int]) -> None:
        super().__init__()
        first, second = hidden
        self.first = nn.Linear(observation, first)
        self.rest = nn.Sequential(nn.Linear(first + action, second), nn.ReLU(), last_layer(second, 1))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """The value of actions."""
        value: Tensor = self.rest(torch.cat([self.first(observations).relu(), actions], -1))
        return value


@final
class Replay:
    """All transitions so far: observation, action, reward, whether the next state is terminal, next observation."""

    def __init__(self, capacity: int, observation: int, action: int) -> None:
        self.parts = [torch.zeros(capacity, width) for width in (observation, action, 1, 1, observation)]
        self.length = 0

    def add(self, *values: Any) -> None:
        """Add one transition."""
        for part, value in zip(self.parts, values, strict=True):
            part[self.length] = torch.as_tensor(value, dtype=torch.float32)
        self.length += 1

    def draw(self, generator: torch.Generator) -> list[Tensor]:
        """A batch of each part, with replacement."""
        rows = torch.randint(self.length, (BATCH,), generator=generator)
        return [part[rows] for part in self.parts]


@final
class DDPG:
    """Actor, critic, their targets, and one environment."""

    def __init__(self, method: str, seed: int, options: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.environment = make(options.environment)
        sides = self.environment.observation_space.shape[0], self.environment.action_space.shape[0]
        self.actor, self.critic = make_actor(*sides, options.hidden), Critic(*sides, options.hidden)
        self.optimizer, self.sampling = explorer(method, self.actor, seed)
        self.critic_optimizer = Adam(self.critic.parameters(), CRITIC_LR)
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critic])).requires_grad_(False)
        self.replay, self.generator = Replay(options.steps, *sides), torch.Generator().manual_seed(seed)
        self.observation, _ = self.environment.reset(seed=seed)

    def step(self) -> None:
        """One step of the environment, and one update once there is a batch."""
        with self.sampling():
            self.act()
            learns = self.replay.length >= BATCH
            if learns:
                batch = self.replay.draw(self.generator)
                self.update_critic(batch)
                self.optimizer.zero_grad()
                self.critic.requires_grad_(False)
                loss: Tensor = -self.critic(batch[0], self.actor(batch[0])).mean()
                loss.backward()
                self.critic.requires_grad_(True)
        if learns:
            self.optimizer.step()
            online = [*self.actor.parameters(), *self.critic.parameters()]
            torch._foreach_lerp_(list(self.targets.parameters()), [param.detach() for param in online], TARGET_RATE)

    def act(self) -> None:
        """Act with the weights of the actor, and remember."""
        action = chosen(self.actor, self.observation)
        following, reward, terminated, truncated, _ = self.environment.step(action)
        self.replay.add(self.observation, action, reward, terminated, following)
        self.observation = self.environment.reset()[0] if terminated or truncated else following

    def update_critic(self, batch: list[Tensor]) -> None:
        """One step towards the targets' values."""
        (observations, actions, rewards, terminal, following), (actor, critic) = batch, self.targets
        with torch.no_grad():
            values = rewards + DISCOUNT * (1 - terminal) * critic(following, actor(following))
        self.critic_optimizer.zero_grad()
        nn.functional.mse_loss(self.critic(observations, actions), values).backward()
        self.critic_optimizer.step()


def make(name: str) -> Any:
    """The environment, with actions between -1 and 1."""
    environment: Any = gymnasium.make(name)
    one = np.ones(environment.action_space.shape, np.float32)
    return gymnasium.wrappers.RescaleAction(environment, -one, one)


@torch.no_grad()
def chosen(actor: nn.Module, observation: Any) -> Any:
    """The action of a policy."""
    return actor(torch.as_tensor(np.asarray(observation, np.float32))[None])[0].numpy()


def mean_return(actor: nn.Module, environment: Any, episodes: int, seed: int) -> float:
    """Undiscounted return over episodes."""
    total = 0.0
    for episode in range(episodes):
        observation, ended = environment.reset(seed=10_000 * (seed + 1) + episode)[0], False
        while not ended:
            observation, reward, terminated, truncated, _ = environment.step(chosen(actor, observation))
            total, ended = total + float(reward), terminated or truncated
    return total / episodes


def run(row: Row, options: argparse.Namespace) -> Iterator[None]:
    """Train; the row gets the return of each test, which uses the mean of the weights."""
    learner, tests = DDPG(row["method"], row["seed"], options), make(options.environment)
    for number in range(1, options.steps + 1):
        learner.step()
        if number % options.test_every == 0 or number == options.steps:
            row["returns"].append(mean_return(learner.actor, tests, options.test_episodes, row["seed"]))
            row["done"] = number
            yield


def table(rows: list[Row]) -> str:
    """Format a Markdown table: the last test and the mean over all tests, over seeds."""
    head = "| method | seeds | steps | last test | mean of all tests | published mean of all tests: 300k, 3M |"
    lines = [head, "| --- |" + " ---: |" * 5]
    for method, published in RELEASED.items():
        group = [row for row in rows if row["method"] == method and row["returns"]]
        if group:
            scores = [row["returns"][-1] for row in group], [statistics.fmean(row["returns"]) for row in group]
            cells = [with_error(statistics.fmean(values), standard_error(values), digits=0) for values in scores]
            cells = [
                method,
                str(len(group)),
                str(min(row["done"] for row in group)),
                *cells,
                ", ".join(with_error(mean, error, 0) for mean, error in published),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="HalfCheetah-v5")
    parser.add_argument("--methods", nargs="+", default=list(RELEASED), choices=RELEASED)
    parser.add_argument("--hidden", type=int, nargs=2, default=[64, 64])
    for name, value in {"seeds": 5, "steps": 100_000, "test-every": 5000, "test-episodes": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="written after each test; finished runs are skipped")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = {
        name: getattr(options, name) for name in ("environment", "steps", "hidden", "test_every", "test_episodes")
    }
    rows: list[Row] = saved_rows(options.json)
    for seed, method in product(range(options.seeds), options.methods):
        key = {"method": method, "seed": seed, **setting}
        if any({**key, "done": options.steps}.items() <= row.items() for row in rows):
            continue
        rows = [row for row in rows if not key.items() <= row.items()]  # an unfinished run starts again
        rows.append({**key, "returns": [], "done": 0})
        for _ in run(rows[-1], options):
            save_json(options.json, {"results": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
