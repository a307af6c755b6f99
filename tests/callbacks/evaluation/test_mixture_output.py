"""In a user's own steps, ``self(x)`` states the mean and the variance of the mixture over samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MCDropoutCallback

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(1))
LOADER = DataLoader(TensorDataset(X, Y), 16)


class Net(Classifier):
    """A network with dropout, any head and any loss, which keeps what its test steps get from ``self(x)``."""

    def __init__(self, head, loss):
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.02), net, loss)
        self.head, self.seen = head, []

    def forward(self, x):
        return self.head(self.net(x))

    def test_step(self, batch, index):
        self.seen.append(self(batch[0]))


def evaluated(head, loss, link=None):
    torch.manual_seed(0)
    net, trainer = Net(head, loss), quiet_trainer(MCDropoutCallback(eval_samples=7, link=link), max_epochs=4)
    trainer.fit(net, LOADER)
    trainer.test(net, LOADER, verbose=False)
    return net.seen, trainer.predict(net, LOADER)


FORMS = {  # the head, the loss, and mean and variance of what self(x) returns
    "mean and variance": (
        lambda f: (f[:, :1], F.softplus(f[:, 1:])),
        lambda f, y: F.gaussian_nll_loss(f[0], y[:, None], f[1]),
        lambda f: (f[0][:, 0], f[1][:, 0]),
    ),
    "mean and log variance": (
        lambda f: f,
        lambda f, y: F.gaussian_nll_loss(f[:, 0], y, f[:, 1].exp()),
        lambda f: (f[:, 0], f[:, 1].exp()),
    ),
    "mean and deviation": (
        lambda f: torch.stack([f[:, 0], F.softplus(f[:, 1])], 1),
        lambda f, y: F.gaussian_nll_loss(f[:, 0], y, f[:, 1].square()),
        lambda f: (f[:, 0], f[:, 1].square()),
    ),
    "a dictionary with a log deviation": (
        lambda f: {"at": f[:, 0], "log_scale": f[:, 1]},
        lambda f, y: F.gaussian_nll_loss(f["at"], y, (2 * f["log_scale"]).exp()),
        lambda f: (f["at"], (2 * f["log_scale"]).exp()),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_own_steps_get_the_moments_of_the_prediction(name):
    head, loss, moments = FORMS[name]
    seen, predicted = evaluated(head, loss)
    for output, prediction in zip(seen, predicted, strict=True):
        mean, variance = moments(output)
        assert prediction["epistemic"].min() > 0
        torch.testing.assert_close(mean, prediction["mean"].reshape(mean.shape))
        total = (prediction["aleatoric"] + prediction["epistemic"]).reshape(mean.shape)
        torch.testing.assert_close(variance, total, rtol=1e-4, atol=1e-6)


def test_a_variance_inside_the_loss_cannot_be_averaged_and_is_told_once(caplog):
    seen, predicted = evaluated(
        lambda f: f,
        lambda f, y: F.gaussian_nll_loss(f[:, 0], y, 1 + f[:, 1].square()),
        lambda f: Normal(f[:, 0], (1 + f[:, 1].square()).sqrt()),
    )
    torch.testing.assert_close(seen[0][:, 0], predicted[0]["mean"])
    assert caplog.text.count("Net's steps get the raw outputs averaged over samples") == 1


def test_outputs_whose_average_is_the_mean_are_not_remarked_on(caplog):
    seen, predicted = evaluated(lambda f: f, lambda f, y: F.mse_loss(f[:, 0], y))
    assert len(seen) == len(predicted) == 2
    evaluated(lambda f: f[:, :1], lambda f, y: F.gaussian_nll_loss(f[:, 0], y, torch.ones_like(y)))
    assert "raw outputs averaged" not in caplog.text
