"""Regression as users write it: loss functions and arguments tell the noise, for predictions, tests and checkpoints."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.distributions import Categorical, Independent, Laplace, MixtureSameFamily, NegativeBinomial, Normal, StudentT
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MCDropoutCallback, VOGNCallback
from lightning_bayes.predictive import Quantiles

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + 0.3 * torch.randn(48, generator=torch.Generator().manual_seed(1))
LOADER = DataLoader(TensorDataset(X, Y), 16)
LEVELS = (0.1, 0.5, 0.9)


class Net(Classifier):
    """A network whose outputs go through a head, and any loss on its output."""

    def __init__(self, head, loss, width):
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, width))
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.02), net, loss)
        self.head, self.log_variance = head, nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, index):
        return self.loss(self, self(batch[0]), batch[1])

    def test_step(self, batch, index):
        self(batch[0])


def same(f):
    return f


def counts(y):
    return y.abs().round()


def pinball(module, f, y):
    error = y[:, None] - f
    return torch.maximum(error * torch.tensor(LEVELS), error * (torch.tensor(LEVELS) - 1)).mean()


# the head, the loss, the number of outputs, and the distribution of the targets given the output
LOSSES = {
    "a pair": (
        lambda f: (f[:, 0], F.softplus(f[:, 1])),
        lambda m, f, y: F.gaussian_nll_loss(f[0], y, f[1]),
        2,
        lambda m, f: Normal(f[0], f[1].sqrt()),
    ),
    "log variance": (
        same,
        lambda m, f, y: F.gaussian_nll_loss(f[:, 0], y, f[:, 1].exp()),
        2,
        lambda m, f: Normal(f[:, 0], (f[:, 1] / 2).exp()),
    ),
    "columns": (
        same,
        lambda m, f, y: nn.GaussianNLLLoss()(f[:, :1], y.unsqueeze(1), F.softplus(f[:, 1:])),
        2,
        lambda m, f: Normal(f[:, 0], F.softplus(f[:, 1]).sqrt()),
    ),
    "one variance": (
        same,
        lambda m, f, y: F.gaussian_nll_loss(f[:, 0], y, m.log_variance.exp().expand_as(y)),
        1,
        lambda m, f: Normal(f[:, 0], (m.log_variance / 2).exp().expand(len(f))),
    ),
    "one fixed variance": (
        same,
        lambda m, f, y: F.gaussian_nll_loss(f.squeeze(1), y, torch.full_like(y, 0.25)),
        1,
        lambda m, f: Normal(f, 0.5),
    ),
    "student": (
        same,
        lambda m, f, y: -StudentT(4.0, f[:, 0], f[:, 1].exp()).log_prob(y).mean(),
        2,
        lambda m, f: StudentT(4.0, f[:, 0], f[:, 1].exp()),
    ),
    "a dictionary": (
        lambda f: {"at": f[:, 0], "log_scale": f[:, 1]},
        lambda m, f, y: -Laplace(f["at"], f["log_scale"].exp()).log_prob(y).mean(),
        2,
        lambda m, f: Laplace(f["at"], f["log_scale"].exp()),
    ),
    "independent": (
        same,
        lambda m, f, y: -Independent(Normal(f[:, :1], f[:, 1:].exp()), 1).log_prob(y[:, None]).mean(),
        2,
        lambda m, f: Normal(f[:, :1], f[:, 1:].exp()),
    ),
    "mixture density": (
        same,
        lambda m, f, y: -_mixture(f).log_prob(y).mean(),
        6,
        lambda m, f: _mixture(f),
    ),
    "counts": (
        same,
        lambda m, f, y: F.poisson_nll_loss(f[:, 0], y),
        1,
        lambda m, f: torch.distributions.Poisson(f.exp()),
    ),
    "overdispersed": (
        same,
        lambda m, f, y: -NegativeBinomial(f[:, 0].exp(), logits=f[:, 1]).log_prob(y).mean(),
        2,
        lambda m, f: NegativeBinomial(f[:, 0].exp(), logits=f[:, 1]),
    ),
}
TARGETS = {"counts": counts(Y), "overdispersed": counts(Y)}
STATED = {"one variance", "student", "a dictionary", "independent", "mixture density", "overdispersed"}  # by link=


def _mixture(f):
    return MixtureSameFamily(Categorical(logits=f[:, :2]), Normal(f[:, 2:4], f[:, 4:].exp()))


def outputs(callback, module):
    """The module's output under every sample, computed without a callback."""
    module.eval()
    samples, found = callback.find_samples(quiet_trainer(), module), []
    for index in range(samples.count):
        with samples.sampled(module, index), torch.no_grad():
            found.append(module(X))
    return found


@pytest.mark.filterwarnings("ignore:log_variance. all examples share these")
@pytest.mark.parametrize("name", LOSSES)
def test_predictions_and_scores_are_those_of_the_mixture_over_samples(name):
    head, loss, width, distribution = LOSSES[name]
    module, loader = Net(head, loss, width), DataLoader(TensorDataset(X, TARGETS.get(name, Y)), 16)
    link = partial(distribution, module) if name in STATED else None
    callback = VOGNCallback(eval_samples=4, relative_noise=0.3, link=link)
    run = quiet_trainer(callback, max_epochs=2)
    run.fit(module, loader)
    batches = run.predict(module, loader)
    found = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    (scores,) = run.test(module, loader, verbose=False)
    each = [distribution(module, output) for output in outputs(callback, module)]
    means, variances = (torch.stack([getattr(one, part) for one in each]).detach() for part in ("mean", "variance"))
    torch.testing.assert_close(found["mean"], means.mean(0))
    torch.testing.assert_close(found["aleatoric"], variances.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["epistemic"], means.var(0, correction=0), rtol=1e-3, atol=1e-6)
    assert (found["epistemic"] > 0).all()
    y = TARGETS.get(name, Y).reshape(means.shape[1:])
    log_density = torch.stack([one.log_prob(y) for one in each]).logsumexp(0) - math.log(4)
    assert scores["test/reg/NLL"] == pytest.approx(-log_density.mean().item(), rel=1e-4)
    assert scores["test/reg/RMSE"] == pytest.approx((y - means.mean(0)).square().mean().sqrt().item(), rel=1e-4)
    inside = (found["lower"] <= y) & (y <= found["upper"])
    assert scores["test/reg/coverage"] == pytest.approx(inside.float().mean().item())
    assert scores["test/reg/width"] == pytest.approx((found["upper"] - found["lower"]).mean().item(), rel=1e-5)


ARGUMENTS = {
    "by hand": (lambda m, f, y: ((y - f[:, 0]) ** 2 * (-f[:, 1]).exp() + f[:, 1]).mean(), 2, "mean_log_variance"),
    "quantiles": (pinball, 3, Quantiles(LEVELS)),
    "a function": (lambda m, f, y: (f[:, 0] - y).cosh().log().mean(), 1, lambda f: Normal(f[:, 0], 0.5)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_settles_what_no_call_tells(name):
    loss, width, link = ARGUMENTS[name]
    run = quiet_trainer(MCDropoutCallback(4, link=link))
    module = Net(same, loss, width)
    run.fit(module, LOADER)
    (scores,) = run.test(module, LOADER, verbose=False)
    assert 0 < scores["test/reg/coverage"] <= 1
    prediction = run.predict(module, LOADER)[0]
    assert (prediction["lower"] < prediction["upper"]).all()
    assert (prediction["aleatoric"] > 0).all()


def test_a_checkpoint_knows_the_noise(tmp_path):
    head, loss, width, _ = LOSSES["log variance"]
    module, callback = Net(head, loss, width), VOGNCallback(eval_samples=4)
    run = quiet_trainer(callback)
    run.fit(module, LOADER)
    run.save_checkpoint(tmp_path / "last.ckpt")
    expected = run.test(module, LOADER, verbose=False)
    other = quiet_trainer(VOGNCallback(eval_samples=4))
    assert other.test(Net(head, loss, width), LOADER, ckpt_path=tmp_path / "last.ckpt", verbose=False) == expected


def test_the_level_of_intervals_can_be_chosen():
    head, loss, width, _ = LOSSES["log variance"]
    module, callback = Net(head, loss, width), VOGNCallback(eval_samples=4)
    callback.interval = 0.5
    run = quiet_trainer(callback)
    run.fit(module, LOADER)
    half = run.predict(module, LOADER)[0]
    callback.interval = 0.99
    wide = run.predict(module, LOADER)[0]
    assert (half["upper"] - half["lower"] < wide["upper"] - wide["lower"]).all()


def test_noise_that_depends_on_the_batch_is_unknown():
    module = Net(same, lambda m, f, y: F.gaussian_nll_loss(f[:, 0], y, y.abs() + 0.1), 1)
    callback = VOGNCallback()
    run = quiet_trainer(callback)
    run.fit(module, LOADER)
    assert callback.loss_likelihood.only.kind.std is None
    assert set(run.predict(module, LOADER)[0]) == {"mean", "variance"}


def test_classes_scored_by_distributions_are_no_real_values():
    module = Net(same, lambda m, f, y: -Categorical(logits=f).log_prob((y > 0).long()).mean(), 2)
    callback = VOGNCallback()
    quiet_trainer(callback).fit(module, LOADER)
    assert not callback.loss_likelihood.outputs


def test_standardised_targets_are_not_scored_against_those_of_the_batch():
    module = Net(same, lambda m, f, y: F.gaussian_nll_loss(f.squeeze(1), (y - 1) / 2, torch.full_like(y, 0.25)), 1)
    run = quiet_trainer(VOGNCallback(eval_samples=4))
    run.fit(module, LOADER)
    assert (run.predict(module, LOADER)[0]["aleatoric"] == 0.25).all()
    assert not any(key.startswith(("test/reg", "test_diff")) for key in run.test(module, LOADER, verbose=False)[0])
