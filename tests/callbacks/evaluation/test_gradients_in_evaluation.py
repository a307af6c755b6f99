"""Steps that differentiate ``self(x)`` in validation, test and prediction get the gradient of the average over samples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import PosteriorSamples

S = 5
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
NETWORKS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)
    ),
    "attention": lambda: Last(
        nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Linear(8, 3))
    ),
    "recurrent": lambda: Last(nn.LSTM(4, 3, batch_first=True)),
}


class Last(nn.Module):
    """A network of sequences, here of length one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        output = self.net(x[:, None])
        return (output[0] if isinstance(output, tuple) else output)[:, 0]


class Net(Classifier):
    """Its steps call one function of the module, with gradients."""

    def __init__(self, found, network="layers"):
        torch.manual_seed(0)
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.05), NETWORKS[network](), F.cross_entropy)
        self.found, self.results = found, []

    def test_step(self, batch, index):
        with torch.enable_grad():
            self.results.append(self.found(self, *batch))

    def predict_step(self, batch, index):
        with torch.enable_grad():
            return {"found": self.found(self, *batch)}


def evaluated(net, callback):
    """What the test step and the prediction found."""
    trainer, loader = quiet_trainer(callback, max_epochs=2, inference_mode=False), DataLoader(TensorDataset(X, Y), 16)
    trainer.fit(net, loader)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    trainer.test(net, loader, verbose=False)
    (predicted,) = trainer.predict(net, loader)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    net.eval()
    return net.results[0], predicted["found"]


def averaged(net, samples, network):
    """The log of the mean probability, as a function of the inputs."""
    return lambda x: (
        torch.stack([network(net, samples, s, x).log_softmax(-1) for s in range(S)]).logsumexp(0) - math.log(S)
    )


def sampled(net, samples, s, x):
    return functional_call(net, samples.tensors(s), (x,))


def linearised(net, samples, s, x):
    mean = samples.posterior.mean
    deviation = {name: value - mean[name] for name, value in samples.weights(s).items()}
    value, change = jvp(lambda weights: functional_call(net, weights, (x,)), (mean,), (deviation,))
    return value + change


def gradient(f, x, y):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(f(x), y), x)[0]


def laplacian(f, x, y):
    """Second derivatives, which differentiate a graph of the graph."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(x)[:, 0].sum(), x, create_graph=True)
    return sum(torch.autograd.grad(slope[:, k].sum(), x, retain_graph=True)[0][:, k] for k in range(x.shape[1]))


def jacobian(f, x, y):
    return jacrev(f)(x).flatten(1)


def jacobian_of_each(f, x, y):
    return vmap(jacrev(lambda row: f(row[None])[0]))(x).flatten(1)


def vogn():
    return VOGNCallback(eval_samples=S, relative_noise=0.3, bayesian=".*")


def assert_alike(results, expected, net, samples, network=sampled):
    """A test step sees the average; a prediction is the average of what the step finds under each sample."""
    predicted = [expected(lambda x, s=s: network(net, samples, s, x), X, Y) for s in range(S)]
    both = (expected(averaged(net, samples, network), X, Y), torch.stack(predicted).mean(0))
    for found, value in zip(results, both, strict=True):
        torch.testing.assert_close(found.detach(), value.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("network", NETWORKS)
def test_input_gradients_are_those_of_the_average(network):
    net, callback = Net(gradient, network), vogn()
    found = evaluated(net, callback)
    samples = PosteriorSamples(callback.optimizer.posterior(), S, callback.seed)
    assert_alike(found, gradient, net, samples)


@pytest.mark.parametrize("found", [laplacian, jacobian, jacobian_of_each])
def test_higher_derivatives_and_torch_func_see_the_average(found):
    net, callback = Net(found), vogn()
    results = evaluated(net, callback)
    samples = PosteriorSamples(callback.optimizer.posterior(), S, callback.seed)
    assert_alike(results, found, net, samples)


@pytest.mark.parametrize("closed", [False, True])
def test_linearised_predictives_have_gradients(closed):
    callback = LaplaceCallback(eval_samples=S, linearized="closed_form" if closed else True)
    net = Net(gradient)
    results = evaluated(net, callback)
    samples = PosteriorSamples(callback.posterior, S, callback.seed)
    assert_alike(results, gradient, net, samples, linearised)


def test_gradients_of_the_weights_are_those_at_the_samples():
    def of_weight(net, x, y):
        return torch.autograd.grad(F.cross_entropy(net(x), y), net.net[0].weight)[0].flatten()[: len(x)]

    net, callback = Net(of_weight), vogn()
    results = evaluated(net, callback)
    samples = PosteriorSamples(callback.optimizer.posterior(), S, callback.seed)
    weights = [{n: v.clone().requires_grad_() for n, v in samples.tensors(s).items()} for s in range(S)]
    logs = torch.stack([functional_call(net, w, (X,)).log_softmax(-1) for w in weights]).logsumexp(0)
    expected = torch.autograd.grad(F.cross_entropy(logs, Y), [w["net.0.weight"] for w in weights])
    torch.testing.assert_close(results[0], sum(expected).flatten()[:16], rtol=1e-4, atol=1e-6)


class Checkpointed(Net):
    """Its first layer is computed again in backward."""

    def forward(self, x):
        return self.net[1:](checkpoint(self.net[0], x, use_reentrant=False))


def test_checkpointing_which_would_recompute_with_other_weights_is_refused():
    with pytest.raises(
        UnsupportedTrainingError, match=r"gradients through Linear under activation checkpointing.*no_grad"
    ):
        evaluated(Checkpointed(gradient), vogn())
    without = Checkpointed(torch.no_grad()(lambda f, x, y: f(x)))
    assert evaluated(without, vogn())[0].shape == (16, 3)
