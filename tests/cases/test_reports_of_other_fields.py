"""Modules of further fields, as public reports have them: without noise they train as in plain Lightning, bit for bit,
and the curvature of the first update, of the default step and of the paper's, is that of a loop over examples.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from oracles import assert_stores
from tiny_training import assert_same_bits, quiet_trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback

N = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


class Case(LightningModule):
    def __init__(self, lr):
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.build()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def one(self, batch, i):
        return [part[i : i + 1] for part in batch]


class BehaviourCloning(Case):
    """https://github.com/pytorch/rl/issues/3635: a Gaussian policy with a learned scale."""

    def build(self):
        self.net, self.log_std = (
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
            nn.Parameter(torch.zeros(2)),
        )

    def data(self):
        return draw(2 * N, 4), draw(2 * N, 2, seed=1)

    def loss(self, batch):
        policy = torch.distributions.Independent(torch.distributions.Normal(self.net(batch[0]), self.log_std.exp()), 1)
        return -policy.log_prob(batch[1]).mean()


class TiedEmbeddings(Case):
    """https://github.com/krasserm/perceiver-io/issues/27: one matrix embeds tokens and scores them."""

    def build(self):
        self.embed, self.net = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True)
        self.score = nn.Linear(4, 7, bias=False)
        self.score.weight = self.embed.weight

    def data(self):
        return (whole(7, 2 * N, 5),)

    def loss(self, batch):
        logits = self.score(self.net(self.embed(batch[0][:, :-1]))[0])
        return F.cross_entropy(logits.reshape(-1, 7), batch[0][:, 1:].reshape(-1))


class Demand(Case):
    """https://github.com/sktime/pytorch-forecasting/issues/1208: counts over time, negative binomial."""

    def build(self):
        self.net, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

    def data(self):
        return draw(2 * N, 5, 2), whole(6, 2 * N, 5).float()

    def loss(self, batch):
        mean, spread = F.softplus(self.head(self.net(batch[0])[0])).add(1e-3).unbind(-1)
        rate = torch.distributions.NegativeBinomial(1 / spread, logits=(mean * spread).log())
        return -rate.log_prob(batch[1]).mean()


class Flow(Case):
    """https://github.com/bayesiains/nflows/issues/76: an affine layer and a coupling, density estimation."""

    def build(self):
        self.scale, self.shift = nn.Linear(2, 2), nn.Linear(2, 2)
        self.log_width = nn.Parameter(torch.zeros(4))

    def data(self):
        return (draw(2 * N, 4),)

    def loss(self, batch):
        left, right = (batch[0] * self.log_width.exp()).chunk(2, 1)
        log_scale = self.scale(left).tanh()
        z = torch.cat([left, right * log_scale.exp() + self.shift(left)], 1)
        return -(-0.5 * z.square().sum(1) + log_scale.sum(1) + self.log_width.sum()).mean()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class DomainAdversary(Case):
    """https://github.com/wearepal/conduit/pull/4: the features deceive a classifier of domains."""

    def build(self):
        self.body, self.classes, self.domain = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def data(self):
        return draw(2 * N, 4), torch.arange(2 * N) % 3, (torch.arange(2 * N) % 2).float()[:, None]

    def loss(self, batch):
        features = self.body(batch[0]).relu()
        domain = self.domain(Reversed.apply(features))
        return F.cross_entropy(self.classes(features), batch[1]) + F.binary_cross_entropy_with_logits(domain, batch[2])


class Tagger(Case):
    """https://github.com/kmkurn/pytorch-crf/issues/77: a conditional random field over padded sequences."""

    def build(self):
        self.embed, self.net = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)
        self.transitions = nn.Parameter(0.1 * torch.randn(3, 3))

    def data(self):
        tokens = whole(9, 2 * N, 5)
        tokens[::2, 3:] = 0
        return tokens, whole(4, 2 * N, 5, seed=1) - 1

    def loss(self, batch):
        emitted, tags, mask = self.net(self.embed(batch[0])), batch[1], batch[0] > 0
        score, alpha = emitted[:, 0].gather(1, tags[:, :1])[:, 0], emitted[:, 0]
        for t in range(1, 5):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + emitted[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            score = score + mask[:, t] * step
            onward = (alpha[:, :, None] + self.transitions + emitted[:, t, None]).logsumexp(1)
            alpha = torch.where(mask[:, t, None], onward, alpha)
        return (alpha.logsumexp(1) - score).mean()


class Ordinal(Case):
    """https://github.com/ludwig-ai/ludwig/pull/3375: levels with one weight and their own biases."""

    def build(self):
        self.net, self.levels = nn.Linear(4, 1, bias=False), nn.Parameter(torch.tensor([0.5, 0.0, -0.5]))

    def data(self):
        return draw(2 * N, 4), torch.arange(2 * N) % 4

    def loss(self, batch):
        logits, above = self.net(batch[0]) + self.levels, (batch[1][:, None] > torch.arange(3)).float()
        return -(F.logsigmoid(logits) * above + F.logsigmoid(-logits) * (1 - above)).sum(1).mean()


class Hazards(Case):
    """https://github.com/havakv/pycox/issues/129: discrete-time survival, the loss up to each patient's last interval."""

    def build(self):
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))

    def data(self):
        return draw(2 * N, 4), torch.arange(2 * N) % 5, (torch.arange(2 * N) % 2).float()

    def loss(self, batch):
        logits, last = self.net(batch[0]), batch[1][:, None]
        events = torch.zeros_like(logits).scatter(1, last, batch[2][:, None])
        of_each = F.binary_cross_entropy_with_logits(logits, events, reduction="none")
        return of_each.cumsum(1).gather(1, last).mean()


class Dynamics(Case):
    """https://github.com/rtqichen/torchdiffeq/issues/177: one field, evaluated eight times; time is the first dimension."""

    def build(self):
        self.field = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))

    def data(self):
        return draw(2 * N, 2), draw(2 * N, 4, 2, seed=1)

    def loss(self, batch):
        y, path = batch[0], []
        for _ in range(4):
            y = y + 0.1 * self.field(y + 0.05 * self.field(y))
            path.append(y)
        return (torch.stack(path) - batch[1].transpose(0, 1)).abs().mean()


class AudioTags(Case):
    """https://github.com/qiuqiangkong/audioset_tagging_cnn/issues/64: a spectrogram, several tags per clip."""

    def build(self):
        self.conv, self.head = nn.Conv1d(9, 4, 3), nn.Linear(4, 3)
        self.register_buffer("window", torch.hann_window(16))

    def data(self):
        return draw(2 * N, 64), (whole(3, 2 * N, 3) - 1).float()

    def loss(self, batch):
        spectrum = torch.stft(batch[0], 16, 8, window=self.window, return_complex=True).abs().log1p()
        return F.binary_cross_entropy_with_logits(self.head(self.conv(spectrum).relu().mean(-1)), batch[1])


class PointClouds(Case):
    """https://github.com/fxia22/pointnet.pytorch/issues/109: a learned transform of points, and a penalty on it."""

    def build(self):
        self.transform, self.features, self.head = nn.Conv1d(3, 9, 1), nn.Conv1d(3, 6, 1), nn.Linear(6, 3)

    def data(self):
        return draw(2 * N, 3, 10), torch.arange(2 * N) % 3

    def loss(self, batch):
        turn = self.transform(batch[0]).max(2)[0].view(-1, 3, 3)
        logits = self.head(self.features(turn @ batch[0]).max(2)[0])
        return F.cross_entropy(logits, batch[1]) + 0.001 * (torch.eye(3) - turn @ turn.mT).norm(dim=(1, 2)).mean()


class AdaptiveWeight(Case):
    """https://github.com/PKU-YuanGroup/WF-VAE/issues/7: the step weighs a term by gradients of the last layer."""

    def build(self):
        self.net, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def data(self):
        return (draw(2 * N, 4),)

    def loss(self, batch):
        errors = self.last(self.net(batch[0]).tanh()) - batch[0]
        square, absolute = errors.square().mean(), errors.abs().mean()
        if len(batch[0]) > 1:
            sizes = [torch.autograd.grad(e, self.last.weight, retain_graph=True)[0].norm() for e in (square, absolute)]
            self.ratio = (sizes[0] / (sizes[1] + 1e-4)).detach()
        return square + self.ratio * absolute

    def one(self, batch, i):
        self.loss(batch)
        return super().one(batch, i)


class SharedCode(Case):
    """https://github.com/shyamsn97/hyper-nn/issues/6: a learned code makes the weights of a layer."""

    def build(self):
        self.code, self.weights, self.head = nn.Parameter(torch.randn(2)), nn.Linear(2, 12), nn.Linear(3, 2)

    def data(self):
        return draw(2 * N, 4), torch.arange(2 * N) % 2

    def loss(self, batch):
        weight = self.weights(self.code[None])[0].view(3, 4)
        return F.cross_entropy(self.head(F.linear(batch[0], weight).tanh()), batch[1])


CASES = Case.__subclasses__()


def fit(module, *callbacks, **options):
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module, DataLoader(TensorDataset(*module.data()), batch_size=N))
    return module


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_without_noise_training_is_plain_lightnings(case):
    plain = fit(case(0.01), max_epochs=3)
    ours = fit(case(0.01), VOGNCallback(relative_noise=1e-30), max_epochs=3)
    assert_same_bits(weights(ours), weights(plain))


@pytest.mark.parametrize("arguments", [{}, {"lr": 1e-30, "prior_precision": 1e-9}], ids=["default", "paper's step"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_curvature_is_that_of_a_loop_over_examples(case, arguments):
    module, callback = case(0.0), VOGNCallback(**arguments)
    rows = [part[:N] for part in module.data()]
    fit(module, callback, max_steps=1)
    assert_stores(callback.optimizer, module, [module.loss(module.one(rows, i)) for i in range(N)])
