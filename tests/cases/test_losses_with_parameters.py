"""Parameters that no layer of the network holds: in loss modules, and scalars such as a learned temperature."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_stores
from tiny_training import Classifier, fit, loader
from torch import nn

from lightning_bayes import IVONCallback, LaplaceCallback, SWAGCallback, VOGNCallback

pytestmark = pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")


class ArcFace(nn.Module):
    """https://github.com/KevinMusgrave/pytorch-metric-learning/issues/534: normalised classes and a margin."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, embedded, y):
        angles = F.linear(F.normalize(embedded), F.normalize(self.classes)).clamp(-0.999, 0.999).acos()
        return F.cross_entropy(10 * (angles + 0.3 * F.one_hot(y, 3)).cos(), y)


class Tempered(nn.Module):
    """https://github.com/openai/CLIP/issues/46: a learned scale of the logits, without dimensions."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(2.0)))

    def forward(self, logits, y):
        return F.cross_entropy(logits * self.logit_scale.exp(), y)


@pytest.mark.parametrize("arguments", [{}, {"lr": 1e-30, "prior_precision": 1e-9}])
@pytest.mark.parametrize("loss", [ArcFace, Tempered])
def test_the_curvature_is_that_of_a_loop_over_examples(loss, arguments):
    module, callback = (
        Classifier(lambda m: torch.optim.Adam(m.parameters(), 0.0), loss=loss()),
        VOGNCallback(**arguments),
    )
    x, y = next(iter(loader()))
    fit(module, callback, max_steps=1)
    losses = [module.training_step((x[i : i + 1], y[i : i + 1]), 0) for i in range(len(x))]
    assert_stores(callback.optimizer, module, losses)


class Scaled(Classifier):
    """A scalar parameter in the network."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) * self.scale.exp()


@pytest.mark.parametrize("callback", [VOGNCallback, IVONCallback, lambda: SWAGCallback(start=0.0)])
def test_scalar_parameters_are_sampled(callback):
    module = Scaled()
    trainer = fit(module, callback(), max_epochs=3)
    probs = torch.cat([batch["probs"] for batch in trainer.predict(module, loader())])
    torch.testing.assert_close(probs.sum(1), torch.ones(48))


class TwoOutputs(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0])[0], batch[1])

    def forward(self, x):
        return self.net(x), x


def test_laplace_takes_the_output_that_the_loss_scores():
    module = TwoOutputs()
    predicted = fit(module, LaplaceCallback(likelihood="classification")).predict(module, loader())[0]
    torch.testing.assert_close(predicted[0]["probs"].sum(1), torch.ones(len(predicted[0]["probs"])))
