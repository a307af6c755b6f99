"""Learned factors, NaN numbers, reloaded data, side effects of layers, and accumulation: what an update measures."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from oracles import assert_stores, mean_squares
from tiny_training import Classifier, assert_close, blobs, fit, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_bayes import VOGN, IVONCallback, NoisyKFACCallback, SWAGCallback, VOGNCallback, measure
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.log_var = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.3))
        self.tasks = nn.Parameter(torch.tensor([0.2, -0.4]))

    def forward(self, x):
        return self.net(x)[:, 0]


def two_losses(m, x, y):
    return F.mse_loss(m(x), y), F.cross_entropy(m.net(x), y.long() % 2)


FACTORS = {
    "factor of the mean": lambda m, x, y: (-m.log_var).exp() * F.mse_loss(m(x), y),
    "divisor of the mean": lambda m, x, y: F.mse_loss(m(x), y) / m.log_var.exp(),
    "factor of each loss": lambda m, x, y: ((-m.log_var).exp() * (m(x) - y).square()).mean(),
    "factor of a sum": lambda m, x, y: m.log_var.exp() * F.mse_loss(m(x), y, reduction="sum"),
    "its logarithm added": lambda m, x, y: 0.5 * (-m.log_var).exp() * F.mse_loss(m(x), y) + 0.5 * m.log_var,
    "in forward, too": lambda m, x, y: m.log_var * F.mse_loss(m.log_var * m(x), y),
    "in a layer, too": lambda m, x, y: m.net.weight.norm() * F.mse_loss(m(x), y),
    "tasks": lambda m, x, y: sum((-s).exp() * each + s for s, each in zip(m.tasks, two_losses(m, x, y), strict=True)),
    "stacked tasks": lambda m, x, y: (m.tasks.softmax(0) * torch.stack(two_losses(m, x, y))).sum(),
    "mixed tasks": lambda m, x, y: torch.lerp(*two_losses(m, x, y), m.log_var.sigmoid()),
    "a share of two": lambda m, x, y: (w := m.log_var.sigmoid()) * (both := two_losses(m, x, y))[0] + (1 - w) * both[1],
    "factor of a root": lambda m, x, y: m.log_var * F.mse_loss(m(x), y).sqrt(),
    "factor of two": lambda m, x, y: m.log_var * sum(two_losses(m, x, y)),
}
REFUSED = {"mixed tasks", "factor of a root"}


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize("name", FACTORS)
def test_a_learned_factor_is_that_of_a_loop_over_examples_or_refused_by_name(name):
    model, loss = Scaled(), FACTORS[name]
    if name in REFUSED:
        with pytest.raises(UnsupportedTrainingError, match=r"log_var is in a term of the loss|loss_reduction="):
            measure(model, lambda: loss(model, X, Y), "squared_gradients")
        return
    found = measure(model, lambda: loss(model, X, Y), "squared_gradients").curvature
    expected = mean_squares(model, [loss(model, X[[i]], Y[[i]]) for i in range(8)])
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize(("rows", "tasks"), [(8, 2), (2, 2), (1, 2), (6, 3), (8, 4)])
def test_stacked_losses_of_tasks_are_not_taken_for_examples(rows, tasks):
    model = Scaled()
    model.tasks = nn.Parameter(torch.linspace(-0.5, 0.5, tasks))

    def loss(m, x, y):
        outputs = m.net(x)[:, 0]
        return (m.tasks.softmax(0) * torch.stack([F.mse_loss((k + 1) * outputs, y) for k in range(tasks)])).sum()

    found = measure(model, lambda: loss(model, X[:rows], Y[:rows]), "squared_gradients").curvature
    expected = mean_squares(model, [loss(model, X[[i]], Y[[i]]) for i in range(rows)])
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Views(nn.Module):
    """A network with a parameter of its own, whose parts are also called one by one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scale = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.net(x)[:, 0]

    def part(self, x):
        return self.net[2](self.net[0](x).relu())


PARTS = {
    "all": lambda m, x, y: F.cross_entropy(m.net(x), y.long() % 2),
    "some": lambda m, x, y: F.cross_entropy(m.part(x), y.long() % 2),
    "by hand": lambda m, x, y: -m.part(x).log_softmax(1)[torch.arange(len(x)), y.long() % 2].mean(),
}


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_called_beside_the_network_are_measured(name):
    model = Views()

    def loss(x, y):
        return F.mse_loss(model(x), y) + PARTS[name](model, x, y)

    found = measure(model, lambda: loss(X, Y), "squared_gradients").curvature
    assert_close(found, mean_squares(model, [loss(X[[i]], Y[[i]]) for i in range(8)]), rtol=1e-4, atol=1e-6)


class Graph(Classifier):
    """One graph convolution after another, on all nodes of a graph."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
        self.neighbours = torch.rand(48, 48, generator=torch.Generator().manual_seed(0)) < 0.2

    def forward(self, x):
        mean = self.neighbours / self.neighbours.sum(1, keepdim=True).clamp(min=1)
        return mean @ self.net[2](mean @ self.net[0](x).tanh())


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback])
def test_a_graph_is_refused_with_the_methods_that_take_it(callback):
    with pytest.raises(
        ExampleDimensionError, match=r"net\.0 \(Linear\) does not keep the examples apart.*use IVON or SWAG"
    ):
        fit(Graph(), callback(), data=loader(48))
    for other in (IVONCallback(), SWAGCallback(start=0.0)):
        trainer = fit(module := Graph(), other, data=loader(48), max_epochs=3)
        assert trainer.predict(module, loader(48))[0]["mutual_information"].shape == (48,)


class Molecules(nn.Module):
    """Sums the nodes of each graph, so that a batch has more nodes than graphs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.node, self.graph = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, nodes, graphs):
        return self.graph(torch.zeros(int(graphs[-1]) + 1, 4).index_add(0, graphs, self.node(nodes).tanh()))


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize("sizes", [(1, 2, 4, 6), (1, 2, 4, 5)], ids=["13 nodes", "12 nodes, a multiple"])
def test_graphs_of_different_sizes_are_measured_whatever_their_sum(sizes):
    model, owners = Molecules(), torch.arange(4).repeat_interleave(torch.tensor(sizes))
    nodes, targets = torch.randn(len(owners), 3, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 2
    found = measure(model, lambda: F.cross_entropy(model(nodes, owners), targets), "squared_gradients").curvature
    losses = [
        F.cross_entropy(model(nodes[owners == i], torch.zeros(sizes[i], dtype=torch.long)), targets[[i]])
        for i in range(4)
    ]
    assert_close(found, mean_squares(model, losses), rtol=1e-4, atol=1e-6)
    with pytest.raises(UnsupportedLayerError, match=r"measure node\.weight.*nodes of graphs.*use VOGN or IVON"):
        measure(model, lambda: F.cross_entropy(model(nodes, owners), targets), "kfac")


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
def test_batch_norm_of_nodes_takes_part_in_the_gradient_of_each_graph():
    model, owners, targets = (
        Molecules(),
        torch.arange(4).repeat_interleave(torch.tensor([1, 2, 4, 5])),
        torch.arange(4) % 2,
    )
    model.node = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    nodes = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    found = measure(model, lambda: F.cross_entropy(model(nodes, owners), targets), "squared_gradients").curvature
    losses = list(F.cross_entropy(model(nodes, owners), targets, reduction="none"))  # at the statistics of the batch
    assert_close(found, mean_squares(model, losses), rtol=1e-4, atol=1e-6)


class Kendall(nn.Module):
    """Learned weights of tasks, as a module of its own: https://arxiv.org/abs/1705.07115."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, losses):
        return sum((-log_var).exp() * loss + log_var for log_var, loss in zip(self.log_vars, losses, strict=True))


class Tasks(Classifier):
    def __init__(self):
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.0))
        self.weighted = Kendall()

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        return self.weighted([F.cross_entropy(outputs, y), F.mse_loss(outputs[:, :1], x[:, :1])])


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
def test_the_learned_weights_of_two_tasks_are_measured_in_a_fit():
    module, callback = Tasks(), VOGNCallback()
    fit(module, callback, max_steps=1)
    x, y = next(iter(loader()))
    assert_stores(callback.optimizer, module, [module.training_step((x[[i]], y[[i]]), 0) for i in range(len(x))])


@pytest.mark.filterwarnings("ignore:Update 1 has a non-finite gradient")
@pytest.mark.parametrize("number", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_loss_times_a_number_that_is_not_finite_is_skipped(number):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = VOGN(model, base=torch.optim.Adam(model.parameters()), num_data=8, relative_noise=0.1)
    with optimizer.sampled_params():
        (number * F.cross_entropy(model(X), Y.long() % 2)).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.weight, before)


class Reloaded(Classifier):
    def train_dataloader(self):
        return DataLoader(Subset(blobs(), range(8 * 2**self.trainer.current_epoch)), 8)


def test_the_number_of_examples_follows_reloaded_data():
    callback = VOGNCallback()
    quiet_trainer(callback, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Reloaded())
    assert callback.optimizer.param_groups[0]["posterior"]["num_data"] == 32


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_power_iterations_of_a_layer_are_those_of_plain_lightning():
    vectors = []
    for ours in ([], [VOGNCallback()]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
        fit(Classifier(net=net), *ours, max_steps=1)
        vectors.append(net[0].weight_u)
    assert torch.equal(*vectors)


class TwoParts(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(batch[0]).tanh()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_weights_without_noise_have_the_squares_of_whole_updates(accumulated):
    """n ḡ² of all n rows of an update, also where a pass runs bare; the prior silences the noise of the head."""
    options = {"betas": (0.9, 0.3), "prior_precision": 1e10, "init_precision": 1.0001e10}
    module, callback = TwoParts(), IVONCallback(lr=1e-12, bayesian="^head", **options)
    fit(module, callback, data=loader(16 // accumulated), max_epochs=8, accumulate_grad_batches=accumulated)
    assert callback.optimizer.num_updates == 24  # more than the updates that count their examples
    expected = torch.zeros_like(module.body.weight)
    for update in range(3):  # of the last epoch; what came before has a weight of .3³
        batch = list(loader(16))[update]
        grad = torch.autograd.grad(module.training_step(batch, 0), module.body.weight)[0]
        expected = 0.3 * expected + 0.7 * 16 * grad.square()
    expected = expected / (1 - 0.3**3)  # the epochs before were the same
    torch.testing.assert_close(
        callback.optimizer.state[module.body.weight]["curvature"], expected, rtol=1e-3, atol=1e-6
    )
