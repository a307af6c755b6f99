"""Losses of several outputs: the curvature is Σ_l J_lᵀ H_l J_l over the outputs, against explicit Jacobians of each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.likelihood import Categorical, Gaussian, Inputs, Likelihood, Raw, ScoredOutput, Targets
from lightning_bayes.posthoc import laplace

F64 = torch.float64
N, DELTA = 7, 0.5
STD = torch.tensor([0.3, 2.0], dtype=F64)


class Heads(nn.Module):
    """Logits of three classes and two values on one trunk."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 4, bias)
        self.logits, self.values = nn.Linear(4, 3, bias), nn.Linear(4, 2, bias)
        self.double()

    def forward(self, x):
        features = self.trunk(x).tanh()
        return {"logits": self.logits(features), "values": self.values(features)}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def batch_of(n=N):
    labels = torch.randint(3, (n,), generator=torch.Generator().manual_seed(2))
    return drawn(n, 3, seed=1), labels, drawn(n, 2, seed=3)


def likelihood_of(logits=None, values=None, ignored=None):
    kinds = {"logits": logits or Categorical(), "values": values or Gaussian(STD.tolist())}
    targets = {"logits": Targets((1,), ignored), "values": Targets((2,))}
    outputs = tuple(ScoredOutput(((name,),), kind, targets[name]) for name, kind in kinds.items())
    return Likelihood(outputs, Inputs((("path", (0,)),)))


def fitted(net, batches, likelihood=None, structure="full", subset="all", curvature="ggn", **options):
    options = {"prior_precision": DELTA, "require_trained": False, **options}
    return laplace(net.eval(), batches, likelihood or likelihood_of(), structure, subset, curvature, **options)


def of_example(net, x, name):
    """∂f/∂θ of one output of an example, ``[K, D]``; 0 for weights of the other head."""
    params = list(net.parameters())
    rows = [
        torch.autograd.grad(v, params, retain_graph=True, materialize_grads=True) for v in net(x[None])[name].flatten()
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def expected(net, batch, kept=None):
    """Σ_i J_iᵀ H_i J_i, where classes count if they are kept."""
    x = batch[0]
    total = torch.zeros((), dtype=F64)
    for index in range(len(x)):
        values = of_example(net, x[index], "values")
        total = total + values.T @ (1 / STD.square()).diag() @ values
        if kept is None or kept[index]:
            probs, logits = net(x[index])["logits"].softmax(0).detach(), of_example(net, x[index], "logits")
            total = total + logits.T @ (probs.diag() - probs.outer(probs)) @ logits
    return total


@pytest.mark.parametrize("batch_size", [N, 3])
def test_the_full_matrix_is_the_sum_over_the_outputs(batch_size):
    net, batch = Heads(), batch_of()
    batches = list(zip(*(each.split(batch_size) for each in batch), strict=True))
    found = fitted(net, batches).posterior.precision
    torch.testing.assert_close(found - DELTA * torch.eye(len(found), dtype=F64), expected(net, batch))


def test_the_diagonal_is_that_of_the_sum():
    net, batch = Heads(), batch_of()
    precision = fitted(net, [batch], structure="diagonal").posterior.precision
    found = torch.cat([precision[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(found - DELTA, expected(net, batch).diagonal())


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_ignored_targets_of_one_output_leave_the_other_as_it_is(structure):
    net, (x, labels, values) = Heads(), batch_of()
    kept = torch.arange(N) % 3 != 0
    batch = x, torch.where(kept, labels, -100), values
    posterior = fitted(net, [batch], likelihood_of(ignored=-100), structure).posterior
    wanted = expected(net, batch, kept)
    if structure == "full":
        torch.testing.assert_close(posterior.precision - DELTA * torch.eye(len(wanted), dtype=F64), wanted)
    else:
        found = torch.cat([posterior.precision[name].flatten() for name, _ in net.named_parameters()])
        torch.testing.assert_close(found - DELTA, wanted.diagonal())


def test_kronecker_factors_of_one_example_are_exact_in_every_layer():
    """With one row, O ⊗ I is the layer's block itself."""
    net, batch = Heads(bias=False), batch_of(1)
    variance = fitted(net, [batch], structure="kronecker").posterior.variance()
    whole, start = expected(net, batch), 0
    for name, param in net.named_parameters():
        own = slice(start, start + param.numel())
        block = whole[own, own] + DELTA * torch.eye(param.numel(), dtype=F64)
        torch.testing.assert_close(variance[name], torch.linalg.inv(block).diagonal().view_as(param))
        start += param.numel()


def test_kronecker_factors_of_a_head_are_those_of_its_output_alone():
    class Alone(Heads):
        def forward(self, x):
            return super().forward(x)["logits"]

    batch = batch_of()
    options = {"subset": "logits", "structure": "kronecker"}
    found = fitted(Heads(), [batch], **options).posterior.variance()
    wanted = fitted(Alone(), [batch[:2]], Categorical(), **options).posterior.variance()
    for name, variance in wanted.items():
        torch.testing.assert_close(found[name], variance)


def test_the_empirical_fisher_squares_the_gradient_of_the_whole_loss_of_an_example():
    net, (x, labels, values) = Heads(), batch_of()
    found = fitted(net, [(x, labels, values)], curvature="empirical_fisher").posterior.precision
    total = torch.zeros_like(found)
    for index in range(N):
        output = net(x[index : index + 1])
        loss = F.cross_entropy(output["logits"], labels[index : index + 1])
        loss = loss + ((output["values"] - values[index]).square() / (2 * STD.square())).sum()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
        total += gradient.outer(gradient)
    torch.testing.assert_close(found - DELTA * torch.eye(len(found), dtype=F64), total)


def test_the_estimated_fisher_approaches_the_exact_one():
    net, batch = Heads(), batch_of()
    wanted = expected(net, batch)
    found = fitted(net, [batch], curvature="fisher", mc_samples=4000).posterior.precision
    found = found - DELTA * torch.eye(len(found), dtype=F64)
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_the_last_layers_are_those_of_each_output():
    posterior = fitted(Heads(), [batch_of()], subset="last_layer").posterior
    assert list(posterior.mean) == ["logits.weight", "logits.bias", "values.weight", "values.bias"]


def test_the_noise_of_an_output_is_that_of_its_residuals():
    net, batch = Heads(), batch_of()
    found = fitted(net, [batch], likelihood_of(values=Gaussian()))
    residuals = batch[2] - net(batch[0])["values"].detach()
    assert found.kinds[1].std == pytest.approx(residuals.square().mean(0).sqrt().tolist())
    assert found.posterior.likelihood.outputs[1].kind.std == found.kinds[1].std
    with pytest.raises(HyperparameterError, match="scores 2 outputs"):
        found.likelihood  # noqa: B018


def test_the_marginal_likelihood_is_that_of_both_targets():
    net, (x, labels, values) = Heads(), batch_of()
    found = fitted(net, [(x, labels, values)])
    output = net(x)
    log_likelihood = -F.cross_entropy(output["logits"], labels, reduction="sum")
    log_likelihood = log_likelihood + torch.distributions.Normal(output["values"], STD).log_prob(values).sum()
    squares = sum(p.square().sum() for p in net.parameters())
    size = sum(p.numel() for p in net.parameters())
    ratio = found.posterior.precision.logdet() - size * math.log(DELTA) + DELTA * squares
    assert found.log_marginal_likelihood == pytest.approx(float((log_likelihood - ratio / 2).detach()))


def test_validation_chooses_one_prior_for_all_outputs():
    """Two equal networks side by side: the NLL doubles, and its minimum stays."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList([Heads(), Heads()])

        def forward(self, x):
            return [8 * net(x)["logits"] for net in self.nets]  # sure, also of labels that are wrong

    x = drawn(40, 3, seed=1)
    labels = Heads()(x)["logits"].argmax(1)
    labels[::8] = (labels[::8] + 1) % 3
    outputs = tuple(ScoredOutput(((index,),), Categorical(), Targets((1,))) for index in range(2))
    both, single = Likelihood(outputs, Inputs((("path", (0,)),))), Likelihood(outputs[:1], Inputs((("path", (0,)),)))
    options = {"prior_precision": "validation", "validation": [(x[::2], labels[::2])]}
    deltas = [
        fitted(Twice(), [(x[1:3], labels[1:3])], known, "diagonal", subset, **options).prior_precision
        for known, subset in ((both, r"\.logits"), (single, r"nets\.0\.logits"))
    ]
    assert deltas[0]["nets.1.logits.weight"] == pytest.approx(deltas[1]["nets.0.logits.weight"], rel=1e-6)


def test_what_has_no_exact_curvature_is_refused_by_name():
    weighted = likelihood_of(Categorical(weight=[1.0, 2.0, 5.0]))
    with pytest.raises(UnsupportedTrainingError, match=r"Categorical\(weight=.* divides by the sum of its weights"):
        fitted(Heads(), [batch_of()], weighted)
    with pytest.raises(HyperparameterError, match="not known: l1_loss has longer tails"):
        fitted(Heads(), [batch_of()], likelihood_of(values=Raw("l1_loss has longer tails")))
