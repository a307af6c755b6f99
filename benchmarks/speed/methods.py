"""The methods of the comparison: for each, a short function from a task to its training step.

A step is everything between two batches: noise, forward, backward, per-example squares, update. Peers follow their own
documentation, compute the squares Σ_i g_i² if they have per-example gradients, and update the mean with torch's Adam.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.cycle import kronecker_cycle
from benchmarks.speed.memory import available_bytes
from benchmarks.speed.models import Task
from benchmarks.speed.rounds import MeanOfUpdates
from benchmarks.speed.update import LR, NOISE, NUM_DATA, as_swapped, update_once
from lightning_bayes import IVON, KFAC, VOGN, NoisyKFAC, Vadam
from lightning_bayes.curvature import Softmax
from lightning_bayes.optim import VariationalOptimizer

Step: TypeAlias = Callable[[], None]
Build: TypeAlias = Callable[[Task], Step]
CYCLE = 10  # T of the callbacks' default step
GIB = 2**30


def adam(task: Task, **arguments: Any) -> Step:
    """Torch's Adam, the baseline."""
    optimizer = torch.optim.Adam(task.model.parameters(), lr=LR, **arguments)

    def step() -> None:
        optimizer.zero_grad()
        task.loss().backward()
        optimizer.step()

    return step


def default_vogn(task: Task, **arguments: Any) -> VOGN:
    """VOGN as its callback sets it up, but with a measurement in every update."""
    return as_swapped(VOGN, task, **arguments)


def in_training(method: type[VariationalOptimizer], interval: int) -> Build:
    """A method as its callback runs it with default arguments: the mean step of a cycle of T updates, one of which measures.

    Args:
        method: The optimizer class.
        interval: T.

    Returns:
        A function that builds the cycle. The first ten updates, which all measure, fall into the warm-up.
    """

    def build(task: Task) -> Step:
        optimizer = as_swapped(method, task, curvature_interval=interval, **task.setting.workspace())
        return MeanOfUpdates(lambda: update_once(optimizer, task), CYCLE)

    return build


def natural_vogn(task: Task, **arguments: Any) -> VOGN:
    """VOGN with the paper's step, damping and bounded noise; VGG16 diverges on random labels without them."""
    return VOGN(task.model, lr=LR, damping=1e-3, num_data=NUM_DATA, relative_noise=NOISE, **arguments)


def vogn(engine: str, make: Callable[..., VOGN] = default_vogn) -> Build:
    """VOGN with one weight sample, measured by `engine`."""

    def build(task: Task) -> Step:
        optimizer = make(task, engine=engine, **task.setting.workspace())
        return lambda: update_once(optimizer, task)

    return build


def kronecker(
    optimizer_class: type[KFAC | NoisyKFAC], step_rule: str | None = None, factors: str | None = None
) -> Build:
    """K-FAC or Noisy K-FAC with one weight sample and labels drawn from the model for the Fisher.

    Args:
        optimizer_class: The optimizer.
        step_rule: The step rule; by default that of the callback without a learning rate.
        factors: The kind of BackPACK's factors; None uses this package's.

    Returns:
        A function that builds the cycle of steps.
    """

    def make(task: Task) -> KFAC | NoisyKFAC:
        rule = step_rule or optimizer_class.default_step
        arguments: dict[str, Any] = {"damping": 1e-3, "likelihood": Softmax()}
        if factors is not None:
            arguments |= {"engine": "backpack", "factors": factors, "unsupported_layers": "mean_field"}
        if rule == "user":
            return as_swapped(optimizer_class, task, **arguments)
        return optimizer_class(task.model, num_data=NUM_DATA, relative_noise=NOISE, lr=LR, step_rule=rule, **arguments)

    return lambda task: kronecker_cycle(task, make)


def stock_backpack(task: Task) -> Step:
    """BackPACK's own `SumGradSquared`, then Adam."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    model = extend(task.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        with backpack(SumGradSquared()):
            task.loss(model).backward()
        optimizer.step()

    return step


def torch_func(task: Task) -> Step:
    """Per-example gradients of the whole model by `torch.func`, their mean and squares, then Adam."""
    model, params = task.model, dict(task.model.named_parameters())
    optimizer = torch.optim.Adam(params.values(), lr=LR)

    def loss_of_one(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        with task.autocast():
            logits = torch.func.functional_call(model, weights, (image[None],))
            return F.cross_entropy(logits, label[None])

    per_example_grads = torch.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))

    def step() -> None:
        weights = {name: param.detach() for name, param in params.items()}
        grads = per_example_grads(weights, task.images, task.labels)
        for name, param in params.items():
            param.grad = grads[name].mean(0)
        squares = {name: grad.square_().mean(0) for name, grad in grads.items()}
        optimizer.step()
        del squares

    return step


def example_loop(task: Task) -> Step:
    """One backward per example, whose gradients and squares are added up, then Adam."""
    params = list(task.model.parameters())
    optimizer = torch.optim.Adam(params, lr=LR)
    examples = [
        replace(task, images=image, labels=label)
        for image, label in zip(task.images.split(1), task.labels.split(1), strict=True)
    ]

    def step() -> None:
        totals, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
        for example in examples:
            grads = torch.autograd.grad(example.loss(), params)
            torch._foreach_add_(totals, grads, alpha=1 / len(examples))
            torch._foreach_addcmul_(squares, grads, grads)
        for param, total in zip(params, totals, strict=True):
            param.grad = total
        optimizer.step()

    return step


def opacus(task: Task) -> Step:
    """Per-example gradients by Opacus' `GradSampleModule`, their squares, then Adam."""
    from opacus import GradSampleModule

    model = GradSampleModule(task.model)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()
        squares = [param.grad_sample.square_().mean(0) for param in task.model.parameters()]
        for param in task.model.parameters():
            param.grad_sample = None
        optimizer.step()
        del squares

    return step


def ivon(task: Task) -> Step:
    """The package ivon-opt with one weight sample; its curvature comes from the noise, not from examples."""
    from ivon import IVON

    optimizer = IVON(task.model.parameters(), lr=LR, ess=NUM_DATA)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            task.loss().backward()
        optimizer.step()

    return step


class Method(NamedTuple):
    """A method of the comparison."""

    title: str
    build: Build
    module: str = "torch"  # required module
    package: str = "torch"  # name of its package on PyPI
    keeps_examples: bool = False  # whether it holds the gradients of all examples in memory at once
    batch_norm: str | None = None  # why it does not support BatchNorm in training mode


BACKPACK = ("backpack", "backpack-for-pytorch")
METHODS: dict[str, Method] = {
    "adam": Method("Adam", adam),
    "adam-fused": Method("Adam, fused=True", partial(adam, fused=True)),
    "vogn-fused": Method("VOGN fused", vogn("fused")),
    "vogn-default": Method("VOGN, default step", in_training(VOGN, CYCLE)),
    "vadam-default": Method("Vadam, default step", in_training(Vadam, CYCLE)),
    "ivon-default": Method("IVON, default step", in_training(IVON, 1)),
    "vogn-natural": Method("VOGN fused, natural step", vogn("fused", natural_vogn)),
    "vogn-backpack": Method("VOGN backpack", vogn("backpack"), *BACKPACK),
    "kfac": Method("K-FAC", kronecker(KFAC)),
    "noisy_kfac": Method("Noisy K-FAC", kronecker(NoisyKFAC)),
    "noisy_kfac-natural": Method("Noisy K-FAC, natural step", kronecker(NoisyKFAC, "natural")),
    "kfac-backpack": Method("K-FAC backpack", kronecker(KFAC, factors="kfac"), *BACKPACK),
    "noisy_kfac-backpack": Method("Noisy K-FAC backpack", kronecker(NoisyKFAC, factors="kfac"), *BACKPACK),
    "noisy_kfac-kflr": Method(
        "Noisy K-FAC backpack, KFLR",
        kronecker(NoisyKFAC, factors="kflr"),
        *BACKPACK,
        batch_norm="KFLR needs examples that do not mix",
    ),
    "backpack-stock": Method(
        "BackPACK SumGradSquared",
        stock_backpack,
        "backpack",
        "backpack-for-pytorch",
        batch_norm="BackPACK's own rules raise NotImplementedError",
    ),
    "torch-func": Method(
        "torch.func vmap(grad)",
        torch_func,
        keeps_examples=True,
        batch_norm="torch.func sees one example at a time, which has no batch statistics",
    ),
    "example-loop": Method(
        "loop over examples", example_loop, batch_norm="single examples have no statistics of the batch"
    ),
    "opacus": Method("Opacus GradSampleModule", opacus, "opacus", "opacus", keeps_examples=True),
    "ivon": Method("ivon-opt", ivon, "ivon", "ivon-opt"),
}


def obstacle(method: Method, task: Task) -> str | None:
    """The reason why a method cannot run on a task, if it is known in advance; otherwise None."""
    if importlib.util.find_spec(method.module) is None:
        return f"absent: pip install {method.package}"
    if method.batch_norm and (layers := batch_norms_in_training(task.model)):
        return f"BatchNorm in training mode ({len(layers)} layers, such as {layers[0]}): {method.batch_norm}"
    return _memory_obstacle(task) if method.keeps_examples else None


def batch_norms_in_training(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in training mode."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, layer in model.named_modules() if isinstance(layer, kinds) and layer.training]


def _memory_obstacle(task: Task) -> str | None:
    needed = 4 * len(task.images) * sum(param.numel() for param in task.model.parameters())
    available = available_bytes(task.setting.device)
    if available is None or 2 * needed < available:  # a factor of 2 for copies and for the other methods
        return None
    return f"memory: the gradients of all examples take {needed / GIB:.1f} GiB, too much for {available / GIB:.1f} GiB free"


def silence_known_warnings() -> None:
    """Silence warnings that libraries repeat in every step of the benchmarks."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    warnings.filterwarnings("ignore", "Extension saving to .* does not have an extension for Module")
