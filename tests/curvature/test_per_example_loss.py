"""Losses of the examples beside a loss that no graph tells how it reduces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, one_example_at_a_time, relative_error
from tiny_training import Classifier, blobs, fit, loader
from torch import nn

from lightning_bayes import IVON, VOGN, IVONCallback, KFACCallback, VOGNCallback
from lightning_bayes.curvature import measure, with_per_example_loss
from lightning_bayes.errors import BayesError, ShapeError, UnsupportedTrainingError


def dice(probs, y, dims=None):
    total = (lambda v: v.sum(dims)) if dims else torch.sum
    return 1 - (2 * total(probs * y) + 1) / (total(probs) + total(y) + 1)


@pytest.fixture
def images(generator):
    x = torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = (torch.rand(5, 1, 4, 4, generator=generator) < 0.4).double()
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 1), nn.Sigmoid()).double()
    return model, x, y


def test_the_gradient_is_that_of_the_loss_and_the_curvature_that_of_the_examples(images):
    model, x, y = images

    def loss():
        out = model(x)
        return with_per_example_loss(dice(out, y), dice(out, y, (1, 2, 3)))

    measured = measure(model, loss, loss_reduction="mean")
    grads = torch.autograd.grad(dice(model(x), y), list(model.parameters()))
    one = lambda m, i: dice(m(x[i : i + 1]), y[i : i + 1])  # noqa: E731
    _, square = one_example_at_a_time(model, list(range(5)), one)
    named = dict(zip(dict(model.named_parameters()), grads, strict=True))
    assert measured.num_examples == 5
    assert relative_error(measured.grad, named) < 1e-10
    assert relative_error(measured.curvature, square) < 1e-10


def test_a_loss_that_equals_neither_mean_nor_sum_is_asked_for(images):
    model, x, y = images

    def loss():
        out = model(x)
        return with_per_example_loss(dice(out, y), dice(out, y, (1, 2, 3)))

    with pytest.raises(UnsupportedTrainingError, match=r"is not recorded.*Pass loss_reduction"):
        measure(model, loss)


class Opaque(torch.autograd.Function):
    """Squares that torch knows nothing of."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.square().sum(1)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad[:, None] * ctx.saved_tensors[0]


@pytest.mark.parametrize("reduced", [torch.mean, torch.sum])
def test_the_value_tells_a_mean_from_a_sum_where_the_graph_does_not(reduced, generator):
    model, x = nn.Linear(3, 4).double(), torch.randn(5, 3, generator=generator, dtype=torch.float64)

    def loss():
        losses = Opaque.apply(model(x))
        return with_per_example_loss(
            torch.stack([*losses[1:], losses[0]]).norm(1) / (1 if reduced is torch.sum else 5), losses
        )

    measured = measure(model, loss)
    assert_measures(measured, model, list(range(5)), lambda m, i: m(x[i]).square().sum(), 1e-10)


def test_examples_that_are_compared_have_the_gradients_of_their_own_losses(generator):
    """InfoNCE: each example's loss depends on all rows."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, z = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))

    def losses():
        return F.cross_entropy(model(x) @ model(z).t(), torch.arange(4), reduction="none")

    def loss():
        own = losses()
        return with_per_example_loss(own.mean(), own)

    with pytest.warns(UserWarning, match="all examples share"):
        measured = measure(model, loss)
    assert_measures(measured, model, list(range(4)), lambda m, i: losses()[i], 1e-10)


def test_rows_of_several_examples_are_told_apart_by_their_losses(generator):
    """Twelve rows of four examples, in a loss that shows neither."""
    model, x = nn.Linear(3, 2).double(), torch.randn(12, 3, generator=generator, dtype=torch.float64)
    own = lambda m, rows: Opaque.apply(m(x[rows]).view(-1, 6))  # noqa: E731
    measured = measure(model, lambda: with_per_example_loss(own(model, slice(12)).mean(), own(model, slice(12))))
    _, square = one_example_at_a_time(model, list(range(4)), lambda m, i: own(m, slice(3 * i, 3 * i + 3)).sum())
    assert measured.num_examples == 4
    assert relative_error(measured.curvature, square) < 1e-10


@pytest.mark.parametrize("pieces", [2, 6])
def test_examples_that_go_through_the_network_in_pieces(pieces, generator):
    """Without their losses they are refused."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(6, 3, generator=generator, dtype=torch.float64), torch.arange(6) % 4

    def losses():
        parts = zip(x.chunk(pieces), y.chunk(pieces), strict=True)
        return torch.cat([F.cross_entropy(model(some), target, reduction="none") for some, target in parts])

    def loss():
        own = losses()
        return with_per_example_loss(own.mean(), own)

    with pytest.raises(BayesError, match="per_example_loss"):
        measure(model, lambda: losses().mean())
    with pytest.warns(UserWarning, match="all examples share"):
        measured = measure(model, loss)
    one = lambda m, i: F.cross_entropy(m(x[i : i + 1]), y[i : i + 1])  # noqa: E731
    assert measured.num_examples == 6
    assert_measures(measured, model, list(range(6)), one, 1e-10)


@pytest.mark.parametrize("views", [1, 2, 4])
def test_one_example_alone_may_go_through_layers_several_times(views, generator):
    """In steps of a recurrence, or in views that are no stack of separate calls."""
    layer, x = nn.Linear(3, 3).double(), torch.randn(1, 3, generator=generator, dtype=torch.float64)

    def loss():
        states = [layer(x)]
        for _ in range(views - 1):
            states.append(layer(states[-1].tanh()))
        return torch.stack([state.square().mean() for state in states]).mean()

    measured = measure(layer, loss)
    grad = torch.autograd.grad(loss(), layer.weight)[0]
    assert measured.num_examples == 1
    torch.testing.assert_close(measured.curvature["weight"], grad.square())


class Returns(Classifier):
    """Returns the losses beside a loss; `twin` returns the loss alone."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return {"loss": losses.mean(), "per_example_loss": losses}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert not outputs["per_example_loss"].requires_grad


class Attaches(Classifier):
    """Returns a loss with attached losses, whose graph shows no mean."""

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return with_per_example_loss(losses.sort().values.mean(), losses)


@pytest.mark.parametrize("step", [Returns, Attaches])
@pytest.mark.parametrize("callback", [VOGNCallback, IVONCallback])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_training_step_that_returns_them_trains_as_one_that_returns_the_loss(callback, batches, step):
    plain, module = Classifier(), step()
    for fitted in (plain, module):
        fit(fitted, callback(num_data=48), data=loader(), accumulate_grad_batches=batches)
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_plain_pytorch_passes_them_by_the_function():
    x, y = blobs(8).tensors
    results = []
    for has_losses in (False, True):
        module = Classifier()
        opt = VOGN(module, lr=0.1, num_data=48)
        for _ in range(3):
            with opt.sampled_params():
                losses = F.cross_entropy(module(x), y, reduction="none")
                loss = losses.mean()
                (with_per_example_loss(loss, losses) if has_losses else loss).backward()
            opt.step()
        results.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_what_cannot_take_them_says_so(images):
    model, x, y = images

    def joined():
        losses = F.mse_loss(model(x), y, reduction="none").mean((1, 2, 3))
        return with_per_example_loss(F.mse_loss(model(x), y), losses)

    with pytest.raises(UnsupportedTrainingError, match=r"per_example_loss is supported only with squared gradients"):
        measure(model, joined, "kfac")
    with pytest.raises(BayesError, match="per_example_loss"):
        fit(Returns(), KFACCallback())
    with pytest.raises(ShapeError, match=r"per_example_loss has shape \[5, 1\]"):
        with_per_example_loss(model(x).mean(), model(x).flatten(1)[:, :1])
    with pytest.raises(UnsupportedTrainingError, match="has no graph"):
        with_per_example_loss(model(x).mean(), model(x).flatten(1)[:, 0].detach())


def test_methods_that_measure_no_examples_overlook_them():
    module = Classifier()
    opt = IVON(module, lr=0.1, num_data=48)
    x, y = blobs(8).tensors
    with opt.sampled_params():
        losses = F.cross_entropy(module(x), y, reduction="none")
        with_per_example_loss(losses.sum(), losses).backward()
        expected = [p.grad / 8 for p in module.parameters()]
    for param, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
