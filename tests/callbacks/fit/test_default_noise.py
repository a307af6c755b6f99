"""The default noise by kind of network, and the effect of explicit values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import NoisyKFACCallback, VadamCallback, VOGNCallback

SIZE = 40
NORMS = [nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm((3, 4, 4))]


class Images(Classifier):
    """Classifies images of one channel and 4 × 4 pixels."""

    def __init__(self, *stages, channels=3, loss=F.cross_entropy):
        torch.manual_seed(0)
        convolution, last = nn.Conv2d(1, channels, 3, padding=1), nn.Linear(16 * channels, 4)
        net = nn.Sequential(convolution, *stages, nn.Tanh(), nn.Flatten(), last)
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), net, loss)


def fit(callback, module=None):
    """The optimizer after a fit."""
    module, generator = module or Images(), torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, 1, 4, 4, generator=generator), torch.randint(4, (SIZE,), generator=generator)
    quiet_trainer(callback, max_epochs=3).fit(module, DataLoader(TensorDataset(x, y), batch_size=10))
    return callback.optimizer


def relative_widths(optimizer):
    """RMS of each tensor's noise over the RMS of its values, which is close to its size."""
    posterior = optimizer.posterior()
    sizes = {name: mean.square().mean().sqrt() for name, mean in posterior.mean.items()}
    return {name: float(v.mean().sqrt() / sizes[name]) for name, v in posterior.variance().items() if "weight" in name}


@pytest.mark.parametrize("callback", [VOGNCallback, VadamCallback, NoisyKFACCallback])
def test_networks_with_convolutions_have_more_noise(callback):
    widths = relative_widths(fit(callback()))
    assert list(widths.values()) == pytest.approx([0.3, 0.3], rel=0.1)


@pytest.mark.parametrize(("stated", "flatness"), [({}, None), ({"noise_flatness": 0.5}, 0.5)])
def test_their_noise_is_flatter(stated, flatness):
    """Σ ∝ 1/(s + ε mean s)."""
    optimizer = fit(VOGNCallback(**stated))
    flatness = optimizer.param_groups[0]["posterior"]["noise_flatness"] if flatness is None else flatness
    assert flatness > 0.03
    s = optimizer.state[optimizer.model.net[0].weight]["curvature"]
    expected = 1 / (s.clamp_min(0) + flatness * s.mean())
    found = optimizer.posterior().variance()["net.0.weight"]
    torch.testing.assert_close(found / found.mean(), expected / expected.mean())


def test_samples_have_the_noise_of_the_posterior():
    optimizer = fit(VOGNCallback(), Images(channels=1000))
    posterior, kernel = optimizer.posterior(), optimizer.model.net[0].weight
    with optimizer.sampled_params():
        noise = kernel.detach() - posterior.mean["net.0.weight"]
    squares = (noise.square() / posterior.variance()["net.0.weight"]).mean()
    assert abs(squares - 1) < 4 * (2 / kernel.numel()) ** 0.5


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_networks_with_normalisation_have_less_noise(norm):
    (group,) = fit(VOGNCallback(), Images(norm)).param_groups
    assert (group["posterior"]["relative_noise"], group["posterior"]["noise_flatness"]) == (0.005, 0.03)


def test_other_classifiers_have_noise_that_follows_the_curvature():
    """Almost all noise is in weights whose input is always zero. They have no curvature."""
    module = Images()
    module.net = nn.Sequential(nn.Flatten(), nn.ZeroPad1d((0, 16)), nn.Linear(32, 4))
    optimizer = fit(VOGNCallback(), module)
    (group,) = optimizer.param_groups
    assert (group["posterior"]["relative_noise"], group["posterior"]["noise_flatness"]) == (0.07, 0.001)
    variance = optimizer.posterior().variance()["net.2.weight"]
    with_input, without = variance[:, :16], variance[:, 16:]
    torch.testing.assert_close(without, without.mean().expand_as(without))
    assert with_input.sum() < 0.02 * without.sum()


def test_regressions_have_the_least_noise():
    curve = Images(loss=lambda output, y: F.mse_loss(output[:, 0], y.float()))
    (group,) = fit(VOGNCallback(), curve).param_groups
    assert (group["posterior"]["relative_noise"], group["posterior"]["noise_flatness"]) == (0.01, 0.03)
