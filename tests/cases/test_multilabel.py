"""Several binary labels per example, and counts: per-label predictions with epistemic uncertainty, from any callback."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, fit
from torch import nn
from torch.distributions import Bernoulli as BernoulliLaw
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import IVONCallback, LaplaceCallback, MCDropoutCallback, VOGNCallback, laplace, mc_predict
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Bernoulli, Poisson, PredictedGaussian
from lightning_bayes.predictive import output_moments, predictive_nll

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
LABELS = (X @ torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) > 0).float()
COUNTS = torch.poisson((X[:, :1] / 2).exp(), generator=torch.Generator().manual_seed(2))


def predicted(callback, loss, targets, epochs=3):
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, targets.shape[1]))
    module = Classifier(lambda m: torch.optim.Adam(m.parameters(), 0.02), net, loss)
    loader = DataLoader(TensorDataset(X, targets), 16)
    batches = fit(module, callback, data=loader, max_epochs=epochs).predict(module, loader)
    return module, {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


LOSSES = {
    "logits": F.binary_cross_entropy_with_logits,
    "a module": nn.BCEWithLogitsLoss(),
    "a sum": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "soft margin": F.multilabel_soft_margin_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("callback", [VOGNCallback, IVONCallback, MCDropoutCallback, LaplaceCallback])
def test_every_label_has_its_own_entropy_and_information(callback, name):
    _, found = predicted(callback(), LOSSES[name], LABELS)
    assert found["probs"].shape == found["entropy"].shape == found["mutual_information"].shape == LABELS.shape
    torch.testing.assert_close(found["entropy"], BernoulliLaw(found["probs"]).entropy(), rtol=1e-4, atol=1e-6)
    assert (found["mutual_information"] > 0).all()
    assert (found["mutual_information"] < found["entropy"]).all()


def test_laplace_averages_each_label_over_its_gaussian_logit():
    callback = LaplaceCallback(likelihood="multilabel", eval_samples=64)
    module, found = predicted(callback, LOSSES["logits"], LABELS)
    module.eval()
    mean, variance = output_moments(module, callback.posterior, lambda: module(X))
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weights = (-grid.square() / 2).exp()
    logits = mean.detach()[..., None] + variance.detach().sqrt()[..., None] * grid
    exact = (logits.sigmoid() * weights).sum(-1) / weights.sum()
    torch.testing.assert_close(found["probs"].double(), exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("likelihood", [None, "counts", "poisson"])
def test_laplace_takes_counts(likelihood):
    callback = LaplaceCallback(likelihood=likelihood)
    _, found = predicted(callback, F.poisson_nll_loss, COUNTS, epochs=10)
    assert isinstance(callback.result.likelihood, Poisson)
    torch.testing.assert_close(found["aleatoric"], found["mean"])  # the variance of a Poisson is its rate
    assert (found["epistemic"] > 0).all()
    assert (found["lower"] == found["lower"].round()).all()


def test_the_likelihoods_of_mc_predict_and_laplace_share_their_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4)).eval()
    result = laplace(model, [(X, LABELS)], "multilabel", "diagonal", prior_precision=1.0, require_trained=False)
    assert isinstance(result.likelihood, Bernoulli)
    by_name, by_link = (mc_predict(model, result, X, link=name) for name in ("multilabel", "sigmoid"))
    torch.testing.assert_close(by_name.probs, by_link.probs)


def test_the_nll_of_sampled_rates_is_that_of_poisson_laws(generator):
    log_rates = torch.randn(5, 48, 1, generator=generator)
    each = torch.distributions.Poisson(log_rates.double().exp()).log_prob(COUNTS.double())
    expected = -(each.logsumexp(0) - torch.tensor(5.0).log()).mean()
    assert predictive_nll(log_rates, COUNTS, "exp") == pytest.approx(expected.item(), rel=1e-6)


def test_laplace_states_the_noise_that_it_chose():
    callback, targets = LaplaceCallback(subset="all"), X[:, :1].sin()
    _, found = predicted(callback, F.mse_loss, targets, epochs=30)
    std = callback.result.likelihood.std
    torch.testing.assert_close(found["aleatoric"], torch.full_like(targets, std**2))
    half = 1.6448536 * (found["aleatoric"] + found["epistemic"]).sqrt()
    torch.testing.assert_close(
        found["upper"] - found["mean"], half, rtol=0.05, atol=0
    )  # 32 values stand for a Gaussian


ROBUST = {
    "l1_loss": F.l1_loss,
    "l1_loss by module": nn.L1Loss(reduction="sum"),
    "smooth_l1_loss": lambda f, y: 2 * F.smooth_l1_loss(f, y, reduction="none").mean(),
    "huber_loss": F.huber_loss,
    "l1_loss beside another": lambda f, y: F.mse_loss(f, y) + 0.1 * F.l1_loss(f, y),
}


@pytest.mark.parametrize("name", ROBUST)
def test_laplace_refuses_robust_losses_unless_a_gaussian_is_asked_for(name):
    function = name.partition(" ")[0]
    with pytest.raises(UnsupportedTrainingError, match=rf"{function} is the likelihood of noise with longer tails"):
        predicted(LaplaceCallback(), ROBUST[name], X[:, :1].sin())
    predicted(LaplaceCallback(likelihood="regression"), ROBUST[name], X[:, :1].sin())


def test_laplace_asks_for_the_likelihood_of_quantiles():
    def pinball(f, y):
        return torch.maximum(0.9 * (y - f), -0.1 * (y - f)).mean()

    with pytest.raises(UnsupportedTrainingError, match="does not know the likelihood of the targets"):
        predicted(LaplaceCallback(), pinball, X[:, :1])


def test_an_error_that_is_only_logged_is_no_part_of_the_loss():
    def loss(f, y):
        F.l1_loss(f, y)
        return F.mse_loss(f, y)

    found = []
    for each in (loss, F.mse_loss):
        torch.manual_seed(0)
        callback = LaplaceCallback()
        predicted(callback, each, X[:, :1].sin())
        state = callback.result.likelihood.state()
        found.append((state.pop("kind"), {key: torch.as_tensor(value) for key, value in state.items() if value}))
    assert found[0][0] == found[1][0] == "gaussian"
    torch.testing.assert_close(found[0][1], found[1][1])


def test_laplace_takes_noise_that_the_network_predicts():
    def loss(f, y):
        return F.gaussian_nll_loss(f[:, 0], y[:, 0], f[:, 1].exp())

    callback = LaplaceCallback()
    module, found = predicted(callback, loss, torch.cat([COUNTS, COUNTS], 1))
    assert callback.result.likelihood.state() == PredictedGaussian("log_variance").state()
    with torch.no_grad():
        torch.testing.assert_close(found["mean"], module.eval()(X)[:, 0])
    assert (found["aleatoric"] > 0).all()
