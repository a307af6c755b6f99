"""Links and noise of losses as users write them: known by their calls, else raw outputs are averaged, aloud."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import tiny_training
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, MCDropoutCallback, SWAGCallback, VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
LOADER = DataLoader(TensorDataset(X, Y), 16)
fit = partial(tiny_training.fit, data=LOADER)


class Net(tiny_training.Classifier):
    """Two outputs, and a loss that is a function of the network's outputs and of labels."""

    def __init__(self, loss):
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.01), net, loss)


def one_hot(y):
    return F.one_hot(y, 2).float()


def vicinal(f, y):
    return 0.3 * F.cross_entropy(f, y) + 0.7 * F.cross_entropy(f, y.flip(0))  # mixup


def mixture(f, y):
    of_each = -0.5 * (y[:, None] - f).square() + F.log_softmax(f.flip(1), 1)
    return -of_each.logsumexp(1).mean()


LINKS = {
    "hard labels": (lambda f, y: F.cross_entropy(f, y), "categorical"),
    "soft labels": (lambda f, y: F.cross_entropy(f, one_hot(y) * 0.9 + 0.05), "categorical"),
    "mixup": (vicinal, "categorical"),
    "by hand": (lambda f, y: -(one_hot(y) * F.log_softmax(f, 1)).sum(1).mean(), "categorical"),
    "distillation": (lambda f, y: F.kl_div(F.log_softmax(f / 2, 1), one_hot(y), reduction="batchmean"), "categorical"),
    "focal": (lambda f, y: ((c := F.cross_entropy(f, y, reduction="none")) * (1 - (-c).exp())).mean(), "categorical"),
    "labels of each output": (lambda f, y: F.binary_cross_entropy_with_logits(f, one_hot(y)), "bernoulli"),
    "counts": (lambda f, y: F.poisson_nll_loss(f, one_hot(y)), "poisson"),
    "l1": (lambda f, y: F.l1_loss(f, one_hot(y)), "raw"),
    "huber, with a penalty": (lambda f, y: F.huber_loss(f, one_hot(y)) + 1e-3 * f.abs().mean(), None),
    "l1 of one output": (lambda f, y: F.l1_loss(f.transpose(0, 1)[0].double(), y.double()), "raw"),
    "q values": (lambda f, y: F.smooth_l1_loss(f.gather(1, y[:, None])[:, 0], y.float()), "raw"),
    "in other units": (lambda f, y: F.mse_loss(3 * f + 1, one_hot(y)), None),
    "probabilities": (lambda f, y: F.binary_cross_entropy(f.sigmoid(), one_hot(y)), "bernoulli"),
    "brier": (lambda f, y: F.mse_loss(f.softmax(1), one_hot(y)), None),
    "cumulative": (lambda f, y: F.mse_loss(f.cumsum(1), one_hot(y)), None),
    "mean and variance": (lambda f, y: F.gaussian_nll_loss(f[:, 0], y.float(), f[:, 1].exp()), "predicted_gaussian"),
    "quantiles": (lambda f, y: (d := one_hot(y) - f).maximum(-0.1 * d).mean(), None),
    "log cosh": (lambda f, y: (f - one_hot(y)).cosh().log().mean(), None),
    "two kinds": (lambda f, y: F.cross_entropy(f, y) + F.mse_loss(f[:, 0], y.float()), None),
    "embeddings": (lambda f, y: F.cross_entropy(f @ f.T, torch.arange(len(f))), None),
    "mixture of densities": (mixture, None),
    "triplets": (lambda f, y: F.triplet_margin_loss(f, f.roll(1, 0), f.roll(2, 0)), None),
}


@pytest.mark.parametrize("name", LINKS)
def test_the_likelihood_follows_the_calls_of_the_loss(name):
    loss, kind = LINKS[name]
    callback = MCDropoutCallback(2)
    fit(Net(loss), callback)
    assert name_of(callback.loss_likelihood) == kind


def name_of(likelihood):
    return None if likelihood.only is None else likelihood.only.kind.name


class Means(Net):
    """Probabilities or rates instead of logits, whose logarithm the loss takes."""

    def __init__(self, loss, head):
        super().__init__(loss)
        self.head = head

    def forward(self, x):
        return self.head(self.net(x))


MEANS = {
    "probabilities": (lambda f: f.softmax(1), lambda p, y: F.nll_loss(p.log(), y)),
    "probabilities of labels": (torch.sigmoid, lambda p, y: F.binary_cross_entropy(p, one_hot(y))),
    "rates": (F.softplus, lambda p, y: F.poisson_nll_loss(p, one_hot(y), log_input=False)),
}


@pytest.mark.parametrize("name", MEANS)
def test_outputs_that_are_means_already_are_averaged_as_they_are(name):
    head, loss = MEANS[name]
    module, callback = Means(loss, head), VOGNCallback(relative_noise=1e-9)
    trainer = fit(module, callback)
    key = "mean" if name == "rates" else "probs"
    mean = torch.cat([batch[key] for batch in trainer.predict(module, LOADER)])
    torch.testing.assert_close(mean, module.eval()(X), rtol=1e-4, atol=1e-6)
    if name != "rates":  # whose curvature is that of rates
        with pytest.raises(UnsupportedTrainingError, match=r"returns the means .* Return them from forward"):
            fit(Means(loss, head), LaplaceCallback())


class Text(Net):
    """Integers alone enter the graph, which has no trace of them."""

    def __init__(self, loss):
        super().__init__(loss)
        self.words = nn.Embedding(10, 4, padding_idx=0)

    def forward(self, x):
        return self.net(self.words(x.abs().long()).sum(1))


def test_the_likelihood_of_a_text_classifier_is_that_of_its_loss():
    callback = MCDropoutCallback(2)
    fit(Text(LINKS["hard labels"][0]), callback)
    assert name_of(callback.loss_likelihood) == "categorical"


class Tokens(Net):
    """Logits [batch, tokens, classes], as language and tagging models have them."""

    def __init__(self, loss, through_forward=True):
        super().__init__(loss)
        self.net, self.through_forward = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3)), through_forward

    def forward(self, x):
        return self.net(x[..., None])

    def training_step(self, batch, index):
        logits = self(batch[0]) if self.through_forward else self.net(batch[0][..., None])
        return self.loss(logits, batch[1][:, None].expand(-1, 4))

    def test_step(self, batch, index):
        self.log("nll", self.loss(self(batch[0]), batch[1][:, None].expand(-1, 4)))


TOKENS = {
    "flat": lambda f, y: F.cross_entropy(f.reshape(-1, 3), y.reshape(-1)),
    "moved": lambda f, y: F.cross_entropy(f.transpose(1, 2), y),
    "shifted": lambda f, y: F.cross_entropy(f[:, :-1].contiguous().view(-1, 3), y[:, 1:].flatten()),
    "masked": lambda f, y: F.cross_entropy(f[y > 0], y[y > 0]),
}


@pytest.mark.parametrize("through_forward", [True, False])
@pytest.mark.parametrize("name", TOKENS)
def test_the_classes_of_tokens_are_in_the_last_dimension(name, through_forward):
    module, callback = Tokens(TOKENS[name], through_forward), MCDropoutCallback(2, p=0.5, layers=r"net\.1")
    trainer = fit(module, callback)
    assert callback.loss_likelihood.only.kind.dim == -1
    batch = trainer.predict(module, LOADER)[0]
    torch.testing.assert_close(batch["probs"].sum(2), torch.ones(16, 4))
    assert batch["entropy"].shape == batch["mutual_information"].shape == (16, 4)


class Ids(Tokens):
    """Tokens are known by a number: a table of vectors, a linear layer, and nothing else."""

    def __init__(self, loss):
        super().__init__(loss)
        self.net = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 3))

    def forward(self, x):
        return self.net((x > 0).long())


@pytest.mark.filterwarnings("ignore:The loss does not show how it reduces")
@pytest.mark.parametrize("callback", [VOGNCallback, lambda: SWAGCallback(start=0.0)])
@pytest.mark.parametrize("name", TOKENS)
def test_the_classes_of_a_table_of_vectors_are_known(name, callback):
    callback, module = callback(), Ids(TOKENS[name])
    fit(module, callback, max_epochs=2)
    assert callback.likelihood_of(module).only.kind.dim == -1


def test_the_test_loss_of_tokens_is_plain_lightnings():
    module, callback = Tokens(TOKENS["flat"]), VOGNCallback(relative_noise=1e-9)
    fit(module, callback)
    (found,) = tiny_training.quiet_trainer(callback).test(module, LOADER, verbose=False)
    (plain,) = tiny_training.quiet_trainer().test(module, LOADER, verbose=False)
    assert found["nll"] == pytest.approx(plain["nll"], rel=1e-5)


@pytest.mark.parametrize("name", ["l1", "log cosh", "quantiles", "two kinds"])
def test_raw_outputs_are_averaged_where_nobody_says_more(name, caplog):
    callback = MCDropoutCallback(4)
    module = Net(LINKS[name][0])
    trainer = fit(module, callback)
    with caplog.at_level(logging.INFO):
        mean = torch.cat([batch["mean"] for batch in trainer.predict(module, LOADER)])
    assert mean.shape == (32, 2)
    assert ("Pass link=" in caplog.text) == (LINKS[name][1] is None)


@pytest.mark.parametrize("name", ["soft labels", "by hand", "distillation", "focal"])
def test_soft_labels_get_the_noise_of_hard_ones(name):
    noise = []
    for loss in (LINKS["hard labels"][0], LINKS[name][0]):
        callback = VOGNCallback()
        fit(Net(loss), callback)
        noise.append(callback.optimizer.param_groups[0]["posterior"]["relative_noise"])
    assert noise[0] == noise[1]


@pytest.mark.parametrize("attribute", ["link", "likelihood"])
def test_attributes_with_common_names_belong_to_the_user(attribute):
    module, callback = Net(LINKS["l1"][0]), VOGNCallback()
    setattr(module, attribute, "softmax")
    fit(module, callback)
    assert name_of(callback.likelihood_of(module)) == "raw"
    module.lightning_bayes_link = "softmax"
    assert name_of(callback.likelihood_of(module)) == "categorical"


@pytest.mark.parametrize("name", ["log cosh", "in other units", "brier"])
def test_laplace_asks_for_an_unknown_likelihood(name):
    with pytest.raises(UnsupportedTrainingError, match="Pass likelihood="):
        fit(Net(LINKS[name][0]), LaplaceCallback())
