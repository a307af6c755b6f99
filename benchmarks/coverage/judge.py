"""Judge one model: measured correctly, refused with a reason, measured wrongly, damaged, or crashed.

In evaluation mode the truth is a loop of autograd calls, one per example, in float64. In training mode, where BatchNorm
mixes the examples, the measured gradient must equal autograd's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.engine import EngineName
from lightning_bayes.errors import BayesError

KEPT = 2  # keeps both kinds of alternating blocks, such as Swin's shifted windows


def shorten(model: nn.Module) -> int:
    """Remove all but the first two of successive equal blocks, in place; returns the number of removed blocks."""
    return sum(
        _shorten_one(module) for module in list(model.modules()) if isinstance(module, (nn.Sequential, nn.ModuleList))
    )


def _shorten_one(blocks: nn.Sequential | nn.ModuleList) -> int:
    runs = [list(run) for _, run in groupby(blocks._modules.items(), key=lambda named: repr(named[1]))]
    remaining = [named for run in runs for named in (run[:KEPT] if _has_parameters(run[0][1]) else run)]
    removed = len(blocks) - len(remaining)
    if removed:
        names = (
            [name for name, _ in remaining] if isinstance(blocks, nn.Sequential) else map(str, range(len(remaining)))
        )
        blocks._modules = dict(zip(names, (block for _, block in remaining), strict=True))
    return removed


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


Loss: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    model: nn.Module
    batch: Sequence[Tensor]
    loss: Loss


@dataclass(frozen=True)
class Verdict:
    """The outcome for a model."""

    word: str
    reason: str = ""


def judge(case: Case, engine: EngineName = "fused", *, training: bool = False) -> Verdict:
    """Measure one batch and compare."""
    model = case.model.train(training)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    try:
        measurement = measure(model, lambda: case.loss(case.batch), engine=engine)
    except BayesError as error:
        return _unless_damaged(model, before, Verdict("refused", _short(error)))
    except TimeoutError:
        raise
    except Exception as error:  # crashes are counted
        return Verdict("crashed", _short(error))
    gradient, square = _of_batch(case), None if training else _of_loop(case)
    if training and _errors(_of_batch(case), gradient):
        return _unless_damaged(model, before, Verdict("skipped", "draws random numbers in training mode"))
    errors = _errors(measurement.grad, gradient) + ([] if square is None else _errors(measurement.curvature, square))
    word = Verdict("wrong", "; ".join(errors[:3])) if errors else Verdict("right")
    return _unless_damaged(model, before, word)


def _unless_damaged(model: nn.Module, before: dict[str, tuple[int, Tensor]], verdict: Verdict) -> Verdict:
    now = dict(model.named_parameters())
    same = now.keys() == before.keys() and all(
        id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in now.items()
    )
    return verdict if same else Verdict("damaged", verdict.reason)


def _of_batch(case: Case) -> dict[str, Tensor]:
    return _gradients(case, case.batch)


def _gradients(case: Case, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    case.model.train(case.model.training)  # some networks cache a graph in evaluation mode until this call
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(case.loss(batch), list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, grads, strict=True) if g is not None}


def _of_loop(case: Case) -> dict[str, Tensor]:
    """The mean squared gradient over examples."""
    # Each batch repeats its example: PyTorch computes a wrong gradient for BatchNorm in evaluation mode with a batch of
    # one whose output gradient is transposed in memory, such as after `flatten(2).transpose(1, 2)`.
    squares: dict[str, Tensor] = {}
    size = len(case.batch[0])
    for i in range(size):
        for name, g in _gradients(case, [tensor[[i, i]] for tensor in case.batch]).items():
            squares[name] = squares.get(name, torch.zeros_like(g)) + g.square() / size
    return squares


def _errors(measured: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    largest = max((float(t.norm()) for t in truth.values()), default=0.0)
    missing = [name for name, t in truth.items() if name not in measured and float(t.norm()) > TOLERANCE**2 * largest]
    pairs = (
        (name, float((measured[name] - t).norm()), float(t.norm())) for name, t in truth.items() if name in measured
    )
    # A gradient can be zero up to rounding, such as that of a key's bias.
    off = [f"{name}: {error / norm:.0e}" for name, error, norm in pairs if error > TOLERANCE * norm + 1e-14 * largest]
    return [f"{name} is missing" for name in missing] + off


def _short(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__
