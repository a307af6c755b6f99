"""A gradient of exactly zero shows nothing: the parameter has no curvature until a gradient arrives, and is checked then."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import mean_squares
from torch import nn

from lightning_bayes import VOGN, NoisyKFAC
from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.likelihood import Categorical

BATCHES, SIZE = 4, 6
pytestmark = pytest.mark.filterwarnings("ignore:.*one backward pass for each of the")


class Net(nn.Module):
    """A head over a layer or a bare parameter; `batch` counts the forward passes."""

    def __init__(self, **parameters):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def features(self, x, batch):
        raise NotImplementedError

    def forward(self, x, batch):
        return self.head(self.features(x, batch))

    def training_step(self, x, batch):
        """As in a LightningModule, whose own parameters no rule covers."""
        return self(x, batch)


class ZeroHead(Net):
    def __init__(self):
        super().__init__(w=torch.randn(4, 4))
        nn.init.zeros_(self.head.weight)

    def features(self, x, batch):
        return torch.tanh(x @ self.w)


class Gate(Net):
    def __init__(self):
        super().__init__(gate=torch.zeros(()), w=torch.randn(4, 4))

    def features(self, x, batch):
        return x + self.gate * torch.tanh(x @ self.w)


class LowRank(Net):
    def __init__(self):
        super().__init__(a=torch.randn(4, 2), b=torch.zeros(2, 4))

    def features(self, x, batch):
        return x + x @ self.a @ self.b


class MaskToken(Net):
    """Replaces rows from the third batch on."""

    def __init__(self):
        super().__init__(token=torch.randn(4))

    def features(self, x, batch):
        return torch.where((x[:, :1] > 0) & (batch > 1), self.token, x)


class LaterUse(Net):
    """A parameter that the graph contains from the third batch on."""

    def __init__(self):
        super().__init__(shift=torch.randn(4))

    def features(self, x, batch):
        return x + self.shift if batch > 1 else x


class Prompts(Net):
    """A pool of prompts, of which a batch uses some, behind a zero scale."""

    def __init__(self):
        super().__init__(pool=torch.randn(3, 4), scale=torch.zeros(3))

    def features(self, x, batch):
        chosen = (x[:, 0] > 0).long()
        return x + self.scale[chosen][:, None] * self.pool[chosen]


class TwoUses(Net):
    """A layer whose weight is used outside of it too, behind a zero head."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)

    def features(self, x, batch):
        return torch.tanh(self.layer(x)) + torch.tanh(F.linear(x, self.layer.weight))


class NotFinite(Net):
    """A bare parameter whose first batch is skipped."""

    def __init__(self):
        super().__init__(w=torch.randn(4, 4))

    def features(self, x, batch):
        return torch.tanh(x @ self.w) * (float("inf") if batch == 0 else 1.0)


ALL = (ZeroHead, Gate, LowRank, MaskToken, LaterUse, Prompts, TwoUses, NotFinite)


def built(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double(), torch.randn(BATCHES, SIZE, 4, dtype=torch.float64), torch.arange(SIZE) % 2


def steps(model, optimizer, xs, y):
    """Train on all batches; yields the curvatures that a loop over the examples finds at the weights of each update."""
    for batch, x in enumerate(xs):
        losses = [F.cross_entropy(model.training_step(x[i : i + 1], batch), y[i : i + 1]) for i in range(SIZE)]
        yield mean_squares(model, losses)
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(model.training_step(x, batch), y).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Update 1 has a non-finite gradient")
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_curvature_is_the_mean_of_the_loops_over_all_updates(kind):
    model, xs, y = built(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = VOGN(model, base=base, num_data=100, relative_noise=1e-30, curvature_interval=1)
    by_update = [truth for truth in steps(model, optimizer, xs, y) if all(v.isfinite().all() for v in truth.values())]
    assert optimizer.num_updates == len(by_update) == BATCHES - (kind is NotFinite)
    for name, param in model.named_parameters():
        absent = torch.zeros_like(param)
        expected = torch.stack([truth.get(name, absent) for truth in by_update]).mean(0)
        torch.testing.assert_close(optimizer.state[param]["curvature"], expected, rtol=1e-6, atol=1e-12)
    some_started_at_zero = any(not by_update[0].get(name, torch.zeros(1)).any() for name, _ in model.named_parameters())
    assert some_started_at_zero or kind is NotFinite


def test_a_gradient_in_a_later_micro_batch_counts():
    model, xs, y = built(MaskToken)
    optimizer = VOGN(model, base=torch.optim.SGD(model.parameters(), lr=0.0), num_data=100, relative_noise=1e-30)
    expected = []
    for batch, x in enumerate(xs):
        losses = [F.cross_entropy(model.training_step(x[i : i + 1], batch), y[i : i + 1]) for i in range(SIZE)]
        expected.append(mean_squares(model, losses))
        with optimizer.sampled_params(0):
            F.cross_entropy(model.training_step(x, batch), y).backward()
    optimizer.step()
    found = optimizer.state[model.token]["curvature"]
    torch.testing.assert_close(found, torch.stack([truth["token"] for truth in expected]).mean(0))
    assert found.all()


class Bare(nn.Module):
    """No layer is measured, so the model's own outputs tell the examples."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(4))
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)

    def forward(self, x):
        return self.backbone(x + self.shift) @ self.weight

    training_step = forward


def test_parameters_without_any_measured_layer_are_measured_by_the_examples_of_the_models_outputs():
    model, (first, second, *_), y = built(Bare)
    model.eval()
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = VOGN(model, base=base, num_data=100, relative_noise=1e-30)
    for x, targets in ((first, y), (second[:2], y[:2])):
        with optimizer.sampled_params(0):
            F.cross_entropy(model(x), targets).backward()
    optimizer.step()
    x, targets = torch.cat([first, second[:2]]), torch.cat([y, y[:2]])
    losses = [F.cross_entropy(model(x[i : i + 1]), targets[i : i + 1]) for i in range(SIZE + 2)]
    for name, expected in mean_squares(model, losses).items():
        torch.testing.assert_close(optimizer.state[model.get_parameter(name)]["curvature"], expected)


def test_noisy_kfac_loops_over_the_parameter_with_the_labels_of_the_data():
    model, xs, y = built(ZeroHead)
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = NoisyKFAC(model, base=base, num_data=100, relative_noise=1e-30, stats_interval=1)
    by_update = [truth["w"] for truth in steps(model, optimizer, xs, y)]
    assert not by_update[0].any()
    torch.testing.assert_close(optimizer.state[model.w]["curvature"], torch.stack(by_update).mean(0))


def test_noisy_kfac_refuses_the_parameter_at_once_with_sampled_labels():
    model, xs, y = built(ZeroHead)
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = NoisyKFAC(model, base=base, num_data=100, likelihood=Categorical())
    with pytest.raises(UnsupportedLayerError, match=r"measure w:"):
        list(steps(model, optimizer, xs, y))
    assert optimizer.num_updates == 0
