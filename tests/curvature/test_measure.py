"""Both engines against a loop of autograd calls, over models and situations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.errors import (
    ExampleDimensionError,
    HyperparameterError,
    NoMeasurementError,
    ShapeError,
    UnsupportedTrainingError,
)


def tokens(batch, generator):
    return torch.randint(0, 11, (batch, 7), generator=generator)


def labels(batch, classes, generator):
    return torch.randint(0, classes, (batch,), generator=generator)


def classify(model, example):
    x, y = example
    return F.cross_entropy(model(x[None]), y[None])


class Scaled(nn.Module):
    """A parameter held directly by a module that has children."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.scale * x)


def test_ignored_positions_of_sequences(generator):
    """The loss averages over tokens: example i's loss is its share of that mean, times the number of examples."""
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5)).double()
    x, y = tokens(4, generator), torch.randint(0, 5, (4, 7), generator=generator)
    y[0, 3:], y[2] = -100, -100  # example 2 does not count at all
    measured = measure(model, lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    total = int((y != -100).sum())
    share = lambda m, e: 3 * F.cross_entropy(m(e[0][None])[0], e[1], reduction="sum") / total  # noqa: E731
    assert measured.num_examples == 3
    assert_measures(measured, model, [(x[i], y[i]) for i in (0, 1, 3)], share, 1e-10)


def test_gradient_by_inputs_is_not_taken_for_a_measurement(generator):
    """Adversarial training differentiates by the input first; only the backward into parameters counts."""
    model, y = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double(), labels(5, 3, generator)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def adversarial_loss():
        (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * by_input.sign()).detach()), y)

    (by_input,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    moved = (x + 0.1 * by_input.sign()).detach()
    measured = measure(model, adversarial_loss)
    _, square = one_example_at_a_time(model, list(zip(moved, y, strict=True)), classify)
    assert relative_error(measured.curvature, square) < 1e-10


def test_bad_arguments_are_named(generator):
    model, x = nn.Linear(4, 2), torch.randn(5, 4, generator=generator)
    with pytest.raises(HyperparameterError, match="engine='opacus' is unknown; use 'fused' or 'backpack'"):
        measure(model, lambda: model(x).mean(), engine="opacus")
    with pytest.raises(HyperparameterError, match="engine='fused' does not measure 'diag_ggn'; pass engine='backpack'"):
        measure(model, lambda: model(x).mean(), "diag_ggn")
    with pytest.raises(HyperparameterError, match="mc_samples=0 must be at least 1"):
        measure(model, lambda: model(x).mean(), "diag_ggn_mc", engine="backpack", mc_samples=0)
    with pytest.raises(
        HyperparameterError, match="quantity='hessian' is unknown; use one of squared_gradients, diag_ggn"
    ):
        measure(model, lambda: model(x).mean(), "hessian")
    with pytest.raises(HyperparameterError, match="loss_reduction='max' is unknown"):
        measure(model, lambda: model(x).mean(), loss_reduction="max")
    with pytest.raises(ShapeError, match=r"The loss has shape \(5, 2\)"):
        measure(model, lambda: model(x))
    with pytest.raises(UnsupportedTrainingError, match="reduced by 'sum' to one reduced by 'mean'"):
        measure(model, lambda: F.mse_loss(model(x), x[:, :2]) + F.mse_loss(model(x), x[:, :2], reduction="sum"))
    with pytest.raises(NoMeasurementError, match="No trainable layer was called"):
        measure(model, lambda: torch.ones((), requires_grad=True) * 2)


def test_batch_that_is_not_finite_passes_through_the_generic_rule(generator):
    """Skipping it is the optimizer's business; the check of the sum waits for a finite batch."""
    model, x = nn.Sequential(Scaled()), torch.full((5, 4), torch.nan)
    assert measure(model, lambda: model(x).mean()).curvature["0.scale"].isnan().all()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 1), (4,)), (nn.Conv2d(3, 1, 3), (3, 5, 5)), (nn.LayerNorm((2, 4)), (2, 4))],
    ids=str,
)
def test_input_without_examples_is_refused_by_name(layer, shape, generator):
    model, x = nn.Sequential(layer), torch.randn(shape, generator=generator)
    name = type(layer).__name__
    message = rf"0 \({name}\) got an input of shape \[{', '.join(map(str, shape))}\] without a dimension for examples"
    with pytest.raises(ExampleDimensionError, match=rf"{message}.*layer\(x\[None\]\)\[0\]"):
        measure(model, lambda: model(x).square().mean())


def test_transformer_with_the_batch_in_dimension_one_is_refused(generator):
    """With as many positions as examples nothing else would tell."""
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), nn.Linear(4, 2))
    x = torch.randn(5, 5, 4, generator=generator)
    with pytest.raises(ExampleDimensionError, match="does not keep the examples apart"):
        measure(model, lambda: model(x).square().mean())
