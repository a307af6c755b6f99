"""Laplace against exact Bayesian linear regression, autograd loops and laplace-torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal

from lightning_bayes.errors import (
    DataError,
    HyperparameterError,
    PosteriorError,
    UnsupportedLayerError,
    UnsupportedTrainingError,
)
from lightning_bayes.likelihood import Bernoulli, Categorical, Gaussian, OutputLikelihood, Poisson
from lightning_bayes.posteriors import EigenGaussian, FullGaussian, MeanField
from lightning_bayes.posthoc import laplace, validation

F64 = torch.float64
STRUCTURES = ["diagonal", "kronecker", "full"]


@pytest.fixture
def x(generator):
    return torch.randn(12, 4, generator=generator, dtype=F64)


@pytest.fixture
def y(generator):
    return torch.randint(3, (12,), generator=generator)


@pytest.fixture
def net(generator):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval()


def untrained(model, batches, likelihood="classification", structure="kronecker", subset="all", *args, **kwargs):
    return laplace(model, batches, likelihood, structure, subset, *args, require_trained=False, **kwargs)


def dense(posterior):
    """The precision over all weights in the order of the mean."""
    if isinstance(posterior, FullGaussian):
        return posterior.precision
    blocks = []
    for name, mean in posterior.mean.items():
        if name in posterior.precision:
            blocks.append(torch.diag(posterior.precision[name].flatten()))
        else:
            bases = posterior.bases[name]
            basis = torch.kron(*bases) if len(bases) == 2 else bases[0]
            blocks.append(basis @ torch.diag(posterior.eigenvalues[name].flatten()) @ basis.mT)
        assert len(blocks[-1]) == mean.numel()
    return torch.block_diag(*blocks)


def jacobian(model, x):
    """∂f/∂θ by autograd, ``[B, C, D]``."""
    rows = []
    for one in x:
        outputs = model(one[None])[0]
        grads = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads]))
    return torch.stack(rows)


def ggn(model, x):
    """Σ_i J_iᵀ H_i J_i of a softmax."""
    probs, jacobians = model(x).softmax(1).detach(), jacobian(model, x)
    hessians = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    return torch.einsum("bcp,bck,bkq->pq", jacobians, hessians, jacobians)


# -- curvature -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "shape", "labels"),
    [
        (Categorical(), (1, 4), torch.tensor([2])),
        (Categorical(), (1, 3, 2), torch.tensor([[0, 2]])),
        (Bernoulli(), (1, 3), torch.tensor([[0.0, 1.0, 1.0]], dtype=F64)),
        (Gaussian(0.3), (1, 2), torch.tensor([[0.5, 1.0]], dtype=F64)),
    ],
)
def test_roots_of_a_likelihood_give_its_hessian(generator, likelihood, shape, labels):
    outputs = torch.randn(shape, generator=generator, dtype=F64)
    columns = [likelihood.root(outputs, index).flatten() for index in range(outputs[0].numel())]
    hessian = torch.autograd.functional.hessian(lambda f: likelihood.nll(f, labels).sum(), outputs)
    size = outputs.numel()
    torch.testing.assert_close(sum(torch.outer(c, c) for c in columns), hessian.reshape(size, size))


def test_a_likelihood_without_a_root_is_refused(x):
    class Own(OutputLikelihood):
        def sample(self, outputs, generator):
            return outputs

        def log_prob(self, outputs, targets):
            return targets - outputs

    with pytest.raises(HyperparameterError, match=r"Own does not define its curvature\. .*curvature='fisher'"):
        untrained(nn.Linear(4, 1).double(), [(x, x[:, :1])], Own())


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_the_ggn_matches_a_loop_over_jacobians(net, x, y, structure):
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    found = dense(untrained(net, batches, structure=structure, prior_precision=0.5).posterior)
    expected = ggn(net, x) + 0.5 * torch.eye(len(found), dtype=F64)
    torch.testing.assert_close(found, torch.diag(expected.diagonal()) if structure == "diagonal" else expected)


def test_kronecker_blocks_are_exact_for_one_example_and_norms_have_their_diagonal(net, x, y):
    posterior = untrained(net, [(x[:1], y[:1])], structure="kronecker", prior_precision=0.5).posterior
    assert isinstance(posterior, EigenGaussian)
    assert sorted(posterior.precision) == ["2.bias", "2.weight"]
    found, whole = dense(posterior), ggn(net, x[:1])
    start = 0
    for name, mean in posterior.mean.items():
        here = slice(start, start := start + mean.numel())
        block = whole[here, here]
        expected = torch.diag(block.diagonal()) if name in posterior.precision else block
        torch.testing.assert_close(found[here, here], expected + 0.5 * torch.eye(len(block), dtype=F64))


def test_batch_sizes_do_not_change_the_factors(net, x, y):
    one = untrained(net, [(x, y)], prior_precision=0.5).posterior
    parts = untrained(net, [(x[:7], y[:7]), (x[7:], y[7:])], prior_precision=0.5).posterior
    torch.testing.assert_close(dense(one), dense(parts))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_empirical_fisher_uses_the_labels_of_the_data(net, x, y, structure):
    found = dense(untrained(net, [(x, y)], "classification", structure, "all", "empirical_fisher", 0.5).posterior)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(net(a[None]), b[None]), net.parameters())])
        for a, b in zip(x, y, strict=True)
    ]
    expected = sum(torch.outer(g, g) for g in rows) + 0.5 * torch.eye(len(found), dtype=F64)
    if structure == "full":
        torch.testing.assert_close(found, expected)
    elif structure == "diagonal":
        torch.testing.assert_close(found.diagonal(), expected.diagonal())
    else:
        torch.testing.assert_close(found[-3:, -3:], expected[-3:, -3:])  # a bias's factor is its block


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_sampled_fisher_estimates_the_ggn(net, x, y, structure):
    draws = [
        dense(untrained(net, [(x, y)], "classification", structure, "last_layer", "fisher", 1e-9, seed=seed).posterior)
        for seed in range(40)
    ]
    exact = dense(untrained(net, [(x, y)], "classification", structure, "last_layer", "ggn", 1e-9).posterior)
    stacked = torch.stack(draws)
    error = stacked.std(0) / math.sqrt(len(draws))
    assert ((stacked.mean(0) - exact).abs() <= 5.5 * error + 1e-12).all()  # t of 39 degrees of freedom, 171 numbers
    assert stacked.std(0).max() > 0
    several = untrained(
        net, [(x, y)], "classification", structure, "last_layer", "fisher", 1e-9, mc_samples=400
    ).posterior
    assert float((dense(several) - exact).norm() / exact.norm()) < 0.1


def test_factors_of_a_convolution_average_over_positions(generator):
    net = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3)).double().eval()
    x, y = torch.randn(5, 2, 3, 3, generator=generator, dtype=F64), torch.arange(5) % 3
    posterior = untrained(net, [(x, y)], prior_precision=0.5).posterior
    left, right = (basis.shape for basis in posterior.bases["0.weight"])
    assert (left, right, posterior.eigenvalues["0.weight"].shape) == ((2, 2, 2), (2, 4, 4), (2, 2, 4))
    outputs = net(x)
    patches = F.unfold(x, 2).unflatten(1, (2, 4))  # [B, groups, K, T]
    hidden = net[0](x).detach().requires_grad_()
    root = 0.0
    for index in range(3):
        (delta,) = torch.autograd.grad(net[2](net[1](hidden)), hidden, Categorical().root(outputs.detach(), index))
        rows = delta.flatten(2).unflatten(1, (2, 2))
        root = root + torch.einsum("bgot,bgpt->gop", rows, rows) / 4
    inputs = torch.einsum("bgkt,bglt->gkl", patches, patches) / 5
    for group in range(2):
        basis = torch.kron(*(part[group] for part in posterior.bases["0.weight"]))
        values = posterior.eigenvalues["0.weight"][group].flatten()
        expected = torch.kron(root[group], inputs[group]) + 0.5 * torch.eye(8, dtype=F64)
        torch.testing.assert_close(basis @ torch.diag(values) @ basis.mT, expected)


# -- subsets and the model -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        ("last_layer", ["3.weight", "3.bias"]),
        (r"^0\.", ["0.weight", "0.bias"]),
        (r"weight$", ["0.weight", "2.weight", "3.weight"]),
    ],
)
def test_parameters_outside_the_subset_are_constants(net, x, y, subset, expected):
    posterior = untrained(net, [(x, y)], structure="diagonal", subset=subset, prior_precision=0.5).posterior
    assert list(posterior.mean) == expected
    assert {*posterior.mean, *posterior.constants} == set(net.state_dict())
    whole = untrained(net, [(x, y)], structure="diagonal", prior_precision=0.5).posterior
    for name in expected:
        torch.testing.assert_close(posterior.precision[name], whole.precision[name])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("classification", "softmax", "categorical"), Categorical),
        (("binary", "multilabel", "sigmoid", "bernoulli"), Bernoulli),
        (("regression", "identity", "gaussian"), Gaussian),
        (("counts", "exp", "poisson"), Poisson),
    ],
)
def test_synonyms_name_the_same_likelihood(names, expected, x):
    model = nn.Sequential(nn.Linear(x.shape[1], 2)).to(x.dtype).eval()
    targets = torch.zeros(len(x), dtype=torch.long) if expected is Categorical else torch.ones_like(x[:, :2])
    results = [
        laplace(model, [(x, targets)], name, "diagonal", prior_precision=1.0, require_trained=False) for name in names
    ]
    assert {type(result.likelihood) for result in results} == {expected}
    assert len({result.log_marginal_likelihood for result in results}) == 1


def test_the_last_layer_is_the_last_one_called(x, y):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

        def forward(self, inputs):
            return self.head(self.body(inputs).tanh())

    posterior = untrained(Backwards().double(), [(x, y)], subset="last_layer", prior_precision=1.0).posterior
    assert list(posterior.mean) == ["head.weight", "head.bias"]


class Scaled(nn.Module):
    """Parameters of its own before, between and after its layers."""

    def __init__(self, place):
        super().__init__()
        self.first, self.head, self.place = nn.Linear(4, 5), nn.Linear(5, 3), place
        self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, x):
        x = x * self.scale if self.place == "before" else x
        x = self.first(x)
        x = x * self.scale if self.place == "between" else x
        x = self.head(x)
        return x * self.scale if self.place == "after" else x.to(self.scale.dtype)


@pytest.mark.parametrize("place", ["before", "between"])
def test_parameters_beside_the_layers_are_not_the_last_layer(place, x, y):
    posterior = untrained(Scaled(place).double(), [(x, y)], subset="last_layer", prior_precision=1.0).posterior
    assert sorted(posterior.mean) == ["head.bias", "head.weight"]


def test_a_module_that_uses_its_own_parameters_last_is_the_last_layer(x, y):
    net = nn.Sequential(nn.Linear(4, 4), Scaled("after")).double()
    posterior = untrained(net, [(x, y)], structure="diagonal", subset="last_layer", prior_precision=1.0).posterior
    assert sorted(posterior.mean) == sorted(f"1.{name}" for name, _ in net[1].named_parameters())


def test_the_model_is_unchanged(net, x, y):
    net[0].weight.requires_grad_(False)
    net[3].bias.grad = torch.ones(3, dtype=F64)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    untrained(net, [(x, y)], curvature="fisher")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [param.requires_grad for param in net.parameters()] == [False, *[True] * 5]
    assert torch.equal(net[3].bias.grad, torch.ones(3, dtype=F64))
    assert torch.equal(state, torch.get_rng_state())


# -- evidence --------------------------------------------------------------------------------------------


@pytest.fixture
def regression(generator):
    """Data, and a linear model at its maximum a posteriori for δ = 2 and σ = 0.3."""
    x = torch.randn(15, 3, generator=generator, dtype=F64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64) + 0.3 * torch.randn(15, 1, generator=generator, dtype=F64)
    return x, y, at_maximum(x, y, 2.0, 0.3)


def at_maximum(x, y, delta, std):
    model = nn.Linear(3, 1, bias=False).double().eval()
    precision = x.T @ x / std**2 + delta * torch.eye(3, dtype=F64)
    model.weight.data = torch.linalg.solve(precision, x.T @ y / std**2).T
    return model


def exact_evidence(x, y, delta, std):
    covariance = x @ x.T / delta + std**2 * torch.eye(len(x), dtype=F64)
    return float(MultivariateNormal(torch.zeros(len(x), dtype=F64), covariance).log_prob(y[:, 0]))


def test_it_is_exact_for_bayesian_linear_regression(regression):
    x, y, model = regression
    found = laplace(model, [(x, y)], Gaussian(0.3), "full", prior_precision=2.0)
    torch.testing.assert_close(found.posterior.precision, x.T @ x / 0.09 + 2 * torch.eye(3, dtype=F64))
    assert found.log_marginal_likelihood == pytest.approx(exact_evidence(x, y, 2.0, 0.3), rel=1e-10)
    kronecker = laplace(model, [(x, y)], Gaussian(0.3), "kronecker", prior_precision=2.0)  # one output: exact, too
    torch.testing.assert_close(dense(kronecker.posterior), found.posterior.precision)
    assert kronecker.log_marginal_likelihood == pytest.approx(found.log_marginal_likelihood, rel=1e-10)


def test_the_empirical_fisher_of_a_regression_scales_with_the_noise(regression):
    x, y, model = regression
    found = laplace(model, [(x, y)], Gaussian(0.3), "full", curvature="empirical_fisher", prior_precision=2.0)
    rows = (model(x) - y).detach() / 0.09 * x
    torch.testing.assert_close(found.posterior.precision, rows.T @ rows + 2 * torch.eye(3, dtype=F64))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_chosen_prior_and_noise_have_the_highest_marginal_likelihood(regression, structure):
    x, y, model = regression
    best = laplace(model, [(x, y)], "regression", structure)
    delta, std = best.prior_precision["weight"], best.likelihood.std
    for other, noise in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        given = laplace(model, [(x, y)], Gaussian(std * noise), structure, prior_precision=delta * other)
        assert given.log_marginal_likelihood < best.log_marginal_likelihood


def test_mackays_fixed_point_holds_for_every_layer(net, x, y):
    """δ ‖θ‖² = γ, the number of parameters that the data determine, in every layer."""
    found = untrained(net, [(x, y)], structure="kronecker", prior_structure="layerwise")
    for layer in ("0", "2", "3"):
        names = [f"{layer}.weight", f"{layer}.bias"]
        (delta,) = {found.prior_precision[name] for name in names}
        posterior = found.posterior
        values = torch.cat([(posterior.eigenvalues | posterior.precision)[name].flatten() for name in names])
        determined = float((1 - delta / values).sum())
        norm = sum(float(posterior.mean[name].square().sum()) for name in names)
        assert delta * norm == pytest.approx(determined, rel=1e-4)
    whole = untrained(net, [(x, y)], structure="full", prior_structure="layerwise")
    assert len(set(whole.prior_precision.values())) == 3


def test_validation_chooses_the_prior_with_the_lowest_nll(net, x, y, generator):
    held_out = [(x + 0.3 * torch.randn(x.shape, generator=generator, dtype=F64), y)]
    found = untrained(net, [(x, y)], structure="diagonal", prior_precision="validation", validation=held_out)
    (delta,) = set(found.prior_precision.values())

    def nll(value):
        posterior = untrained(net, [(x, y)], structure="diagonal", prior_precision=value).posterior
        inputs, jacobians = held_out[0][0], jacobian(net, held_out[0][0])
        variance = (jacobians.square() / torch.cat([p.flatten() for p in posterior.precision.values()])).sum(2)
        return F.cross_entropy(net(inputs) / (1 + math.pi / 8 * variance).sqrt(), y).item()

    best = nll(delta)
    assert all(best <= nll(10**power) + 1e-6 for power in range(-4, 5))


@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_search_runs_the_network_once_for_batches_whose_derivatives_fit(net, x, y, structure, monkeypatch):
    found, calls = {}, {}
    first = 5 * ((4 + 5) + 3 * (2 * 5 + 2 * 5 + 2 * 3))  # of five examples: inputs, and three columns for three layers
    for room in (0, first, 100 * first):
        monkeypatch.setattr(validation, "STORED_ELEMENTS", room)
        sizes = list[int]()
        hook = net.register_forward_hook(lambda model, inputs, output, sizes=sizes: sizes.append(len(output)))
        held_out = [(x[:5], y[:5]), (x[5:9], y[5:9])]
        options = {"structure": structure, "prior_precision": "validation", "validation": held_out}
        found[room] = untrained(net, [(x, y)], **options).prior_precision
        hook.remove()
        calls[room] = [sizes.count(len(inputs)) for inputs, _ in held_out]
    assert found[0] == found[first] == found[100 * first]
    deltas = calls[0][0]
    assert deltas > 17  # a grid, and the refinement of its best point
    assert calls == {0: [deltas, deltas], first: [1, deltas], 100 * first: [1, 1]}


@pytest.mark.parametrize("wrong", [True, False], ids=["widest", "narrowest"])
def test_a_search_that_ends_at_an_edge_says_so(wrong):
    """One confident weight: if held-out labels contradict it, any variance helps; if they agree, none does."""
    model = nn.Linear(1, 1, bias=False, dtype=F64).eval()
    nn.init.constant_(model.weight, 4.0)
    x = torch.linspace(-1, 1, 20, dtype=F64)[:, None]
    y = (x > 0).to(F64)
    options = {"structure": "full", "prior_precision": "validation", "validation": [(x, 1 - y if wrong else y)]}
    with pytest.warns(
        UserWarning, match=r"ended at an edge of its range, 0\.0001 to 10000, for weight .* no prior in it fits"
    ):
        found = laplace(model, [(x, y)], "binary", **options)
    assert found.at_edge == ("weight",)
    assert found.prior_precision["weight"] == pytest.approx(1e-4 if wrong else 1e4, rel=0.1)
    assert laplace(model, [(x, y)], "binary", "full", prior_precision=1e4).at_edge == ()


def test_validation_chooses_the_noise_too(regression):
    x, y, model = regression
    found = laplace(model, [(x, y)], "regression", "full", prior_precision="validation", validation=[(x, y)])
    assert 0.1 < found.likelihood.std < 0.5


@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
def test_validation_scores_a_likelihood_of_the_user_by_its_own_nll(x):
    class Own(OutputLikelihood):
        def sample(self, outputs, generator):
            return Bernoulli().sample(outputs, generator)

        def log_prob(self, outputs, targets):
            return Bernoulli().log_prob(outputs, targets)

        def root(self, outputs, index):
            return Bernoulli().root(outputs, index)

    model = nn.Linear(4, 1).double()
    batch = x, (model(x).detach() > 0).to(F64)  # all correct, so a narrow posterior is best
    found, expected = (
        untrained(model, [batch], likelihood, prior_precision="validation", validation=[batch])
        for likelihood in (Own(), Bernoulli())
    )
    assert found.prior_precision == expected.prior_precision
    assert min(found.prior_precision.values()) > 1000


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # emitted by torch's first `jvp` in a process
def test_it_agrees_with_laplace_torch(net, x, y):
    from laplace import Laplace as Peer

    plain = nn.Sequential(net[0], net[1], net[3])
    for subset in ("all", "last_layer"):
        for structure, name in zip(STRUCTURES, ("diag", "kron", "full"), strict=True):
            peer = Peer(copy.deepcopy(plain), "classification", subset, name, prior_precision=0.5)
            peer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5))
            found = untrained(plain, [(x, y)], structure=structure, subset=subset, prior_precision=0.5)
            assert found.log_marginal_likelihood == pytest.approx(float(peer.log_marginal_likelihood()), rel=1e-8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_regression_of_several_outputs_agrees_with_laplace_torch(net, x, generator):
    from laplace import Laplace as Peer

    plain = nn.Sequential(net[0], net[1], net[3])
    y = torch.randn(12, 3, generator=generator, dtype=F64)
    for structure, name in zip(STRUCTURES, ("diag", "kron", "full"), strict=True):
        peer = Peer(copy.deepcopy(plain), "regression", "all", name, sigma_noise=0.3, prior_precision=0.5)
        peer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5))
        found = untrained(plain, [(x, y)], Gaussian(0.3), structure=structure, prior_precision=0.5)
        assert found.log_marginal_likelihood == pytest.approx(float(peer.log_marginal_likelihood()), rel=1e-8)


# -- bad input -------------------------------------------------------------------------------------------


def test_an_untrained_network_is_refused(x, y, generator):
    net = nn.Linear(4, 3).double()
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    message = r"Linear was not trained: its NLL on the training data is 1\.099, compared with 1\.0"
    with pytest.raises(UnsupportedTrainingError, match=message):
        laplace(net, [(x, y)])
    nn.init.constant_(net.bias, 5.0)
    with pytest.raises(UnsupportedTrainingError, match=r"was not trained: its mean squared error .* is 2[45]"):
        laplace(net, [(x, torch.zeros(12, 3, dtype=F64) + 1e-3 * x[:, :3])], "regression")
    nn.init.constant_(net.bias, -5.0)
    labels = (torch.rand(12, 3, generator=generator) < 0.5).to(F64)
    with pytest.raises(UnsupportedTrainingError, match=r"was not trained: its NLL"):
        laplace(net, [(x, labels)], "binary")


@pytest.mark.parametrize("batch", [torch.zeros(2, 4), {"x": torch.zeros(2, 4)}, (torch.zeros(2, 4),)])
def test_a_loader_without_labels_is_refused(net, batch):
    with pytest.raises(DataError, match=r"yields a \w+, of which nothing tells .* pairs \(inputs, targets\)"):
        laplace(net, [batch])


def test_an_empty_loader_is_refused(net):
    with pytest.raises(DataError, match=r"yields no batch\. Pass the training data"):
        laplace(net, [])


@pytest.mark.parametrize(
    ("layer", "label"), [(nn.BatchNorm1d(4), r"1 \(BatchNorm1d\)"), (nn.Dropout(0.5), r"1 \(Dropout\)")]
)
def test_training_mode_is_refused(x, y, layer, label):
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3)).double().train()
    with pytest.raises(UnsupportedTrainingError, match=rf"^{label} is in training mode, .* Call model\.eval\(\) first"):
        laplace(net, [(x, y)])


def test_a_full_posterior_that_is_too_large_lists_alternatives(y):
    net, x = nn.Linear(10_000, 3), torch.zeros(12, 10_000)
    message = (
        r"structure='full' of 30,003 parameters, 30,003 × 30,003 numbers, would take 3\.4 GiB, .*"
        r"Use structure='kronecker' or 'diagonal', or subset='last_layer'"
    )
    with pytest.raises(PosteriorError, match=message):
        untrained(net, [(x, y)], structure="full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "kron"}, r"structure='kron' is unknown; use 'diagonal', 'kronecker', 'full'"),
        (
            {"likelihood": "gausian"},
            r"likelihood='gausian' is unknown\. Did you mean 'gaussian'\? Use 'classification'",
        ),
        ({"curvature": "hessian"}, r"curvature='hessian' is unknown; use ggn, fisher, empirical_fisher"),
        ({"prior_precision": 0.0}, r"prior_precision=0\.0 must be positive"),
        ({"prior_precision": "cv"}, r"prior_precision='cv' is unknown; use 'marglik', 'validation'"),
        ({"prior_precision": "validation"}, r"validation=NoneType are incompatible\. Pass a loader"),
        ({"mc_samples": 0}, r"mc_samples=0 must be at least 1"),
        ({"prior_structure": "per_weight"}, r"prior_structure='per_weight' is unknown"),
    ],
)
def test_unknown_arguments_are_refused(net, x, y, arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        laplace(net, [(x, y)], **arguments)


def test_half_precision_is_refused(net, x, y):
    with pytest.raises(UnsupportedTrainingError, match=r"stored as torch\.bfloat16"):
        untrained(net.bfloat16(), [(x.bfloat16(), y)], structure="full")


def test_a_subset_without_parameters_lists_the_available_ones(net, x, y):
    with pytest.raises(UnsupportedLayerError, match=r"subset='head' matches no parameter .* has 0\.weight, 0\.bias"):
        laplace(net, [(x, y)], subset="head")


def test_a_parameter_used_outside_its_layer_is_refused(x, y):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, inputs):
            return F.linear(self.last(self.first(inputs).tanh()), self.first.weight[:, :3])

    for structure in STRUCTURES:
        with pytest.raises(
            UnsupportedLayerError, match=r"do not depend on first\.weight through the forward of its own"
        ):
            untrained(Tied().double(), [(x, y)], structure=structure)


def test_each_structure_has_its_posterior_family(net, x, y):
    found = [type(untrained(net, [(x, y)], structure=s, prior_precision=1.0).posterior) for s in STRUCTURES]
    assert found == [MeanField, EigenGaussian, FullGaussian]
