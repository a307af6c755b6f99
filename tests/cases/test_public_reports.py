"""Modules as people write them in public reports, trained for one update by `VOGNCallback`, beside a loop over examples.

Each case names its report. The first update has no noise and the learning rate is 0, so the stored curvature is the mean
squared gradient of single examples at the initial weights. An unknown reduction counts as a mean in the default step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from oracles import mean_squares
from tiny_training import assert_close, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import BayesError

N = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:The loss does not show how it reduces:UserWarning"
    ),  # said aloud, as it should be
    pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning"),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case(LightningModule):
    """A module whose `losses` are the per-example losses, the truth of the comparison."""

    arguments: ClassVar[dict[str, Any]] = {}  # of the callback
    has_known_scale = True  # otherwise the loss counts as a mean, and the curvature is right up to one factor

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def losses(self, batch: Any) -> Iterable[Tensor]:
        return [self.loss([part[i : i + 1] for part in batch]) for i in range(N)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.0)

    def loader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=N)


class MaskedNodes(Case):
    """https://github.com/pyg-team/pytorch_geometric/pull/4197: a graph is one batch, the loss selects labelled nodes."""

    has_known_scale = False

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.mask = torch.arange(N) % 2 == 0

    def data(self):
        return draw(N, 4), torch.arange(N) % 3

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0])[self.mask], batch[1][self.mask])

    def losses(self, batch):
        return [F.cross_entropy(self.net(batch[0][i : i + 1]), batch[1][i : i + 1]) for i in self.mask.nonzero()[:, 0]]


class VAE(Case):
    """https://github.com/Lightning-Universe/lightning-bolts/issues/565: reconstruction plus a weighted mean KL."""

    def build(self) -> None:
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def data(self):
        return (draw(N, 4),)

    def terms(self, x, eps):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        decoded = self.decoder(mean + eps * (log_variance / 2).exp())
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return decoded, kl

    def loss(self, batch):
        decoded, kl = self.terms(batch[0], draw(N, 2, seed=1))
        return F.mse_loss(decoded, batch[0]) + 0.1 * kl.mean()

    def losses(self, batch):
        eps = draw(N, 2, seed=1)
        for i in range(N):
            decoded, kl = self.terms(batch[0][i : i + 1], eps[i : i + 1])
            yield F.mse_loss(decoded, batch[0][i : i + 1]) + 0.1 * kl.mean()


class Quantiles(Case):
    """https://github.com/sktime/pytorch-forecasting/issues/309: several quantiles of each target."""

    def build(self) -> None:
        self.net = nn.Linear(4, 3)
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def data(self):
        return draw(N, 4), draw(N, 1, seed=2)

    def loss(self, batch):
        error = batch[1] - self.net(batch[0])
        return torch.maximum(self.levels * error, (self.levels - 1) * error).mean()


class VoidPixels(Case):
    """https://github.com/ultralytics/ultralytics/issues/25096: pixels of an ignored class."""

    def build(self) -> None:
        self.net = nn.Conv2d(1, 3, 3, padding=1)

    def data(self):
        classes = torch.randint(3, (N, 4, 4), generator=torch.Generator().manual_seed(3))
        classes[0] = 255
        classes[:, 0] = 255
        return draw(N, 1, 4, 4), classes

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=255)

    def losses(self, batch):
        counted = (batch[1] != 255).flatten(1).sum(1)
        factor = (counted > 0).sum() / counted.sum()
        for i in range(1, N):
            yield factor * F.cross_entropy(
                self.net(batch[0][i : i + 1]), batch[1][i : i + 1], ignore_index=255, reduction="sum"
            )


class Speech(Case):
    """https://github.com/huggingface/transformers/pull/28582: CTC over frames in the first dimension."""

    def build(self) -> None:
        self.net = nn.Linear(4, 5)

    def data(self):
        return draw(N, 6, 4), torch.randint(1, 5, (N, 2), generator=torch.Generator().manual_seed(4))

    def loss(self, batch):
        logits = self.net(batch[0]).transpose(0, 1).log_softmax(-1)
        lengths = torch.full((len(batch[0]),), 6), torch.full((len(batch[0]),), 2)
        return F.ctc_loss(logits, batch[1], *lengths, zero_infinity=True)


class TwoLoaders(Case):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/17804: two data sets in one batch of a CombinedLoader."""

    arguments: ClassVar[dict[str, Any]] = {"num_data": 2 * N}  # of two loaders, N is ambiguous

    def build(self) -> None:
        self.net = nn.Linear(4, 1)

    def loader(self):
        halves = [DataLoader(TensorDataset(draw(N, 4, seed=i), draw(N, 1, seed=9)), batch_size=N // 2) for i in (0, 1)]
        return CombinedLoader({"first": halves[0], "second": halves[1]}, "min_size")

    def loss(self, batch):
        x, y = (torch.cat([batch["first"][i], batch["second"][i]]) for i in (0, 1))
        return F.mse_loss(self.net(x), y)

    def losses(self, batch):
        x, y = (torch.cat([batch["first"][i], batch["second"][i]]) for i in (0, 1))
        return [F.mse_loss(self.net(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]


class Ranking(Case):
    """https://github.com/pyg-team/pytorch_geometric/issues/7196: a pairwise loss over two embedding tables."""

    def build(self) -> None:
        self.users, self.items = nn.Embedding(5, 3), nn.Embedding(7, 3)

    def data(self):
        generator = torch.Generator().manual_seed(5)
        return tuple(torch.randint(high, (N,), generator=generator) for high in (5, 7, 7))

    def loss(self, batch):
        user, liked, other = self.users(batch[0]), self.items(batch[1]), self.items(batch[2])
        return -F.logsigmoid((user * (liked - other)).sum(1)).mean()


class Residual(Case):
    """https://github.com/PINA-org/PINA/issues/100: the residual of a differential equation, from a second derivative."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def data(self):
        return (draw(N, 1),)

    def loss(self, batch):
        x = batch[0].requires_grad_()
        u = self.net(x)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return F.mse_loss(torch.autograd.grad(first.sum(), x, create_graph=True)[0], -u)


class Sequence(Case):
    """https://github.com/MTSWebServices/RecTools/pull/187: a masked mean over the positions of all sessions."""

    def build(self) -> None:
        self.items, self.net = nn.Embedding(6, 4), nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 6)

    def data(self):
        return (torch.randint(1, 6, (N, 4), generator=torch.Generator().manual_seed(6)),)

    def loss(self, batch):
        logits = self.head(self.net(self.items(batch[0][:, :-1]))[0])
        return F.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none").mean()


class Detector(Case):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/20389: a dictionary of losses that are added up."""

    def build(self) -> None:
        self.body, self.classes, self.boxes = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 4)

    def data(self):
        return draw(N, 4), torch.arange(N) % 3, draw(N, 4, seed=7)

    def loss(self, batch):
        features = self.body(batch[0]).tanh()
        losses = {
            "class": F.cross_entropy(self.classes(features), batch[1]),
            "box": F.smooth_l1_loss(self.boxes(features), batch[2]),
        }
        return sum(losses.values())


class Counts(Case):
    """https://github.com/scverse/scvi-tools/pull/1845: counts under a Poisson likelihood."""

    def build(self) -> None:
        self.net = nn.Linear(4, 2)

    def data(self):
        return draw(N, 4), draw(N, 2, seed=8).abs().round()

    def loss(self, batch):
        return F.poisson_nll_loss(self.net(batch[0]), batch[1])


class Ensembled(Case):
    """https://github.com/pytorch/opacus/issues/530: one module called twice in a Siamese network."""

    def build(self) -> None:
        self.net = nn.Linear(4, 3)

    def data(self):
        return draw(N, 4), draw(N, 4, seed=9), torch.arange(N) % 2

    def loss(self, batch):
        distance = (self.net(batch[0]).tanh() - self.net(batch[1]).tanh()).square().sum(1)
        return torch.where(batch[2] > 0, distance, F.relu(1 - distance)).mean()


class Distilled(Case):
    """https://github.com/yoshitomo-matsubara/torchdistill/pull/74: a student of soft targets and labels."""

    def build(self) -> None:
        self.net = nn.Linear(4, 3)

    def data(self):
        return draw(N, 4), torch.arange(N) % 3, draw(N, 3, seed=10)

    def loss(self, batch):
        logits = self.net(batch[0])
        soft = F.kl_div((logits / 2).log_softmax(1), (batch[2] / 2).softmax(1), reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, batch[1]) + 0.5 * 4 * soft


CASES = Case.__subclasses__()


def trained(module: LightningModule, loader: Any, **arguments: Any) -> VOGNCallback:
    callback = VOGNCallback(**arguments)
    fit(module, callback, data=loader, max_steps=1)
    return callback


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_curvature_is_that_of_a_loop_over_examples(case):
    torch.manual_seed(0)
    module = case()
    loader = module.loader()
    batch = next(iter(loader))
    batch = batch[0] if isinstance(loader, CombinedLoader) else batch
    expected = mean_squares(module, module.losses(batch))
    optimizer = trained(module, loader, **module.arguments).optimizer
    found = {name: optimizer.state[param]["curvature"] for name, param in module.named_parameters()}
    factor = 1.0
    if not module.has_known_scale:
        factor = sum(value.sum() for value in expected.values()) / sum(value.sum() for value in found.values())
    assert_close({name: factor * value for name, value in found.items()}, expected, rtol=1e-4, atol=1e-9)


class Contrastive(Case):
    """https://github.com/facebookresearch/vissl/pull/123: SimCLR's loss, whose terms share the whole batch."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def data(self):
        return draw(N, 4), draw(N, 4, seed=11)

    def loss(self, batch):
        views = F.normalize(torch.cat([self.net(batch[0]), self.net(batch[1])]))
        similarity = (views @ views.T / 0.5).fill_diagonal_(-math.inf)
        return F.cross_entropy(similarity, (torch.arange(2 * N) + N) % (2 * N))


class Cox(Case):
    """https://github.com/havakv/pycox/issues/27: a partial likelihood over the risk set of a batch."""

    def build(self) -> None:
        self.net = nn.Linear(4, 1)

    def data(self):
        return draw(N, 4), draw(N, seed=12).abs()

    def loss(self, batch):
        risk = self.net(batch[0])[batch[1].argsort(descending=True), 0]
        return -(risk - risk.logcumsumexp(0)).mean()


@pytest.mark.parametrize("case", [Contrastive, Cox], ids=lambda case: case.__name__)
def test_a_loss_over_the_whole_batch_trains_or_is_refused_by_name(case):
    """No example has a loss of its own: the fit runs with a finite curvature, or the error offers per-example losses."""
    module = case()
    try:
        optimizer = trained(module, module.loader()).optimizer
    except BayesError as error:
        text = str(error)
    else:
        text = "per_example_loss"
        assert all(bool(optimizer.state[param]["curvature"].isfinite().all()) for param in module.parameters())
    assert "per_example_loss" in text or "loss_reduction" in text
