"""Every posterior family: samples, densities and marginals against a dense Gaussian; files, devices, errors."""

from __future__ import annotations

import math

import pytest
import torch
from random_matrices import F64, chain, seeded, spd
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from lightning_bayes.errors import PosteriorError
from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct
from lightning_bayes.posteriors import (
    AbstractPosterior,
    BlockTridiagonal,
    EigenGaussian,
    FullGaussian,
    LowRankGaussian,
    MatrixGaussian,
    MeanField,
    ScaledPosterior,
    check_full_size,
    kronecker_precision,
    layer_matrix,
    layer_tensors,
    linear_chain,
)
from lightning_bayes.predictive import PosteriorSamples, mc_predict

SIDES = [(3, 3), (2, 4)]  # (out, in + 1) of two linear layers
SHAPES = {"net.0.weight": (3, 2), "net.0.bias": (3,), "net.2.weight": (2, 3), "net.2.bias": (2,)}
BIASES = {"net.0.weight": "net.0.bias", "net.2.weight": "net.2.bias"}
PRIOR = {"net.0.weight": 2.0, "net.0.bias": 0.5, "net.2.weight": 3.0, "net.2.bias": 1.5}
STEPS = {"net.steps": torch.tensor(3)}
FAMILIES = ["mean_field", "matrix", "eigen", "full", "low_rank", "block_tridiagonal", "scaled"]
SCALE = 0.3


def mean(generator):
    return {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in SHAPES.items()}


def matrix_factors(generator):
    return {name: tuple(spd(n, generator=generator) for n in side) for name, side in zip(BIASES, SIDES, strict=True)}


def build(family, generator):
    """The posterior and its dense precision, over weights joined in the order of SHAPES."""
    if family == "scaled":
        inner, precision = build("matrix", generator)
        return ScaledPosterior(inner, SCALE), precision / SCALE**2
    common = {"mean": mean(generator), "prior_precision": dict(PRIOR), "num_data": 50, "constants": dict(STEPS)}
    if family == "mean_field":
        precision = {n: 0.1 + torch.rand(s, generator=generator, dtype=F64) for n, s in SHAPES.items()}
        return MeanField(precision=precision, **common), torch.diag(joint(precision))
    if family == "full":
        precision = spd(17, generator=generator)
        return FullGaussian(precision=precision, **common), precision
    if family == "eigen":
        return eigen_gaussian(generator, common)
    if family == "low_rank":
        diagonal = {n: 0.1 + torch.rand(s, generator=generator, dtype=F64) for n, s in SHAPES.items()}
        columns = {n: torch.randn(3, *s, generator=generator, dtype=F64) for n, s in SHAPES.items()}
        joined = torch.cat([value.flatten(1) for value in columns.values()], 1)
        covariance = torch.diag(joint(diagonal)) + joined.T @ joined
        return LowRankGaussian(diagonal=diagonal, deviations=columns, **common), torch.linalg.inv(covariance)
    if family == "matrix":
        factors = matrix_factors(generator)
        dense = torch.block_diag(*(torch.kron(*pair) for pair in factors.values()))
        return MatrixGaussian(factors=factors, biases=dict(BIASES), precision={}, **common), in_parameter_order(dense)
    own, links = chain(SIDES, generator)
    blocks, link = [torch.kron(*pair) for pair in own], torch.kron(*links[0])  # two layers: the approximation is exact
    dense = torch.cat([torch.cat([blocks[0], link], 1), torch.cat([link.T, blocks[1]], 1)])
    factors, between = dict(zip(BIASES, own, strict=True)), {"net.0.weight": links[0]}
    return BlockTridiagonal(factors=factors, links=between, biases=dict(BIASES), **common), in_parameter_order(dense)


def eigen_gaussian(generator, common):
    """S ⊗ A + δ I of every weight, S + δ I of the first bias; the last bias is mean-field."""
    bases, values, blocks = {}, {}, []
    for name, sides in {"net.0.weight": (3, 2), "net.0.bias": (3,), "net.2.weight": (2, 3)}.items():
        factors = [spd(n, generator=generator) for n in sides]
        spectra, vectors = zip(*(torch.linalg.eigh(factor) for factor in factors), strict=True)
        right = spectra[1] if len(sides) == 2 else torch.ones(1, dtype=F64)
        bases[name], values[name] = vectors, torch.outer(spectra[0], right) + PRIOR[name]
        dense = torch.kron(*factors) if len(sides) == 2 else factors[0]
        blocks.append(dense + PRIOR[name] * torch.eye(len(dense), dtype=F64))
    precision = {"net.2.bias": torch.tensor([4.0, 9.0], dtype=F64)}
    dense = torch.block_diag(*blocks, torch.diag(precision["net.2.bias"]))
    return EigenGaussian(bases=bases, eigenvalues=values, precision=precision, **common), dense


def in_parameter_order(dense):
    """From layers' matrices, flattened row by row with the bias last, to weight, bias, weight, bias."""
    order, start = [], 0
    for rows, columns in SIDES:
        index = start + torch.arange(rows * columns).view(rows, columns)
        order += [index[:, :-1].flatten(), index[:, -1]]
        start += rows * columns
    return dense[torch.cat(order)][:, torch.cat(order)]


def joint(values):
    return torch.cat([values[name].flatten() for name in SHAPES])


def parts(vector):
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    return {n: p.view(s) for (n, s), p in zip(SHAPES.items(), torch.split(vector, sizes), strict=True)}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def built(family, generator):
    return build(family, generator)


@pytest.fixture
def posterior(built):
    return built[0]


@pytest.fixture
def truth(built):
    return MultivariateNormal(joint(built[0].mean), precision_matrix=built[1])


def test_it_is_a_posterior(posterior):
    assert isinstance(posterior, AbstractPosterior)


def test_its_transformation_has_the_covariance(posterior, truth):
    """T from basis vectors as noise: T Tᵀ = Σ, without sampling errors that could hide a wrong triangle."""
    columns = [joint(posterior.transform(parts(e))) - joint(posterior.mean) for e in torch.eye(17, dtype=F64)]
    root = torch.stack(columns, 1)
    torch.testing.assert_close(root @ root.T, truth.covariance_matrix)


def test_samples_have_the_stated_mean_and_covariance(posterior, truth, generator):
    draws = torch.stack([joint(posterior.sample(generator)) for _ in range(3000)])
    covariance, n = truth.covariance_matrix, len(draws)
    variance = covariance.diagonal()
    assert ((draws.mean(0) - truth.mean) / (variance / n).sqrt()).abs().max() < 4
    error = torch.sqrt((variance[:, None] * variance + covariance.square()) / (n - 1))
    assert ((torch.cov(draws.T) - covariance) / error).abs().max() < 4.8  # 153 pairs


def test_samples_come_from_the_generator_alone(posterior):
    state = torch.get_rng_state()
    first, again, other = (posterior.sample(seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in SHAPES)
    assert {n: (tuple(w.shape), w.dtype) for n, w in first.items()} == {n: (s, F64) for n, s in SHAPES.items()}


def test_densities_are_those_of_torch_distributions(posterior, truth, generator):
    weights = posterior.sample(generator)
    prior = MultivariateNormal(
        torch.zeros(17, dtype=F64),
        torch.diag(1 / joint({n: torch.full(s, PRIOR[n]) for n, s in SHAPES.items()})).to(F64),
    )
    torch.testing.assert_close(posterior.log_prob(weights), truth.log_prob(joint(weights)))
    torch.testing.assert_close(posterior.entropy(), truth.entropy())
    torch.testing.assert_close(posterior.kl(), kl_divergence(truth, prior))
    torch.testing.assert_close(joint(posterior.variance()), truth.variance)
    torch.testing.assert_close(joint(posterior.std), truth.stddev)


def test_the_variance_along_directions_is_that_of_the_dense_gaussian(posterior, truth, generator):
    directions = {n: torch.randn(4, *s, generator=generator, dtype=F64) for n, s in SHAPES.items()}
    joined = torch.cat([d.flatten(1) for d in directions.values()], 1)
    expected = (joined @ truth.covariance_matrix * joined).sum(1)
    torch.testing.assert_close(posterior.variance_along(directions), expected)
    by_block = [posterior.variance_along({name: directions[name] for name in block}) for block in posterior.blocks()]
    torch.testing.assert_close(torch.stack(by_block).sum(0), expected)
    for positions in (1, 3) if ["net.0.weight"] in posterior.blocks() else ():
        shapes = [(4, positions, size) for size in SHAPES["net.0.weight"]]
        left, right = (torch.randn(shape, generator=generator, dtype=F64) for shape in shapes)
        dense = posterior.variance_along({"net.0.weight": torch.einsum("bto,btk->bok", left, right)})
        torch.testing.assert_close(posterior.variance_along_rows("net.0.weight", left, right), dense)
    assert sorted(name for block in posterior.blocks() for name in block) == sorted(SHAPES)


def equal(a, b):
    """Compare dictionaries of state values."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.device == b.device
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return all(map(equal, a, b)) if isinstance(a, tuple) else a == b


def test_its_state_survives_a_file_that_is_loaded_safely(posterior, tmp_path):
    torch.save(posterior.state_dict(), tmp_path / "posterior.pt")
    loaded = type(posterior).from_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    assert equal(loaded.state_dict(), posterior.state_dict())
    assert equal(loaded.sample(seeded(1)), posterior.sample(seeded(1)))


def test_select_cuts_the_name_and_keeps_the_distribution(posterior):
    part = posterior.select("net.")
    short = {name.removeprefix("net."): value for name, value in posterior.sample(seeded(1)).items()}
    assert equal(part.sample(seeded(1)), short)
    assert part.constants == {"steps": STEPS["net.steps"]}
    assert (part.num_data, part.prior_precision) == (50, {n.removeprefix("net."): v for n, v in PRIOR.items()})
    torch.testing.assert_close(part.kl(), posterior.kl())


@pytest.mark.parametrize("prefix", ["net.0.", "net.2."])
def test_select_of_a_layer_is_its_marginal(posterior, truth, family, prefix):
    if family == "block_tridiagonal":
        with pytest.raises(PosteriorError, match=r"selects the layers net\.\d\.weight of the chain .*Sample from the"):
            posterior.select(prefix)
        return
    part, inside = posterior.select(prefix), torch.tensor([n.startswith(prefix) for n in SHAPES])
    inside = inside.repeat_interleave(torch.tensor([math.prod(s) for s in SHAPES.values()]))
    marginal = MultivariateNormal(truth.mean[inside], truth.covariance_matrix[inside][:, inside])
    weights = {"weight": part.mean["weight"] + 0.3, "bias": part.mean["bias"] - 0.2}
    flat = torch.cat([weights["weight"].flatten(), weights["bias"]])
    torch.testing.assert_close(part.log_prob(weights), marginal.log_prob(flat))


def test_select_of_nothing_says_what_there_is(posterior):
    with pytest.raises(PosteriorError, match=r"starts with 'head\.'; it has net\.0\.weight, net\.0\.bias, "):
        posterior.select("head.")


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [tensor for entry in inner for tensor in tensors(entry)]


def test_to_moves_every_tensor(posterior):
    moved = tensors(posterior.to("meta").state_dict())
    assert len(moved) == len(tensors(posterior.state_dict())) > 4
    assert all(tensor.is_meta for tensor in moved)


def changed(posterior, **values):
    """A posterior with another state; for a scaled posterior, the state of the inner one."""
    state = posterior.state_dict()
    inner = {"posterior": {**state["posterior"], **values}} if isinstance(posterior, ScaledPosterior) else values
    return type(posterior).from_state_dict({**state, **inner})


def test_a_missing_prior_is_named(posterior):
    with pytest.raises(PosteriorError, match=r"prior do not match for net\.2\.bias\.$"):
        changed(posterior, prior_precision={n: v for n, v in PRIOR.items() if n != "net.2.bias"})


def test_predictions_take_any_family(posterior):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    chosen = changed(posterior, constants={}).select("net.")
    x, draws = torch.ones(4, 2, dtype=F64), PosteriorSamples(chosen, 5, seed=2)
    expected = torch.stack([torch.func.functional_call(net, draws.weights(k), (x,)) for k in range(5)])
    found = mc_predict(net, chosen, x, samples=5, seed=2, link="classification").sample_probs
    torch.testing.assert_close(found, expected.softmax(-1))


# -- widths -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", FAMILIES[:-1])
def test_a_scaled_posterior_has_the_same_noise_at_another_width(inner, generator):
    posterior, _ = build(inner, generator)
    one, scaled = posterior.sample(seeded(3)), ScaledPosterior(posterior, SCALE).sample(seeded(3))
    torch.testing.assert_close(
        scaled, {name: mean + SCALE * (one[name] - mean) for name, mean in posterior.mean.items()}
    )


def test_a_posterior_of_width_zero_is_the_point_and_says_so(generator, tmp_path):
    point = ScaledPosterior(build("full", generator)[0], 0.0)
    torch.save(point.state_dict(), tmp_path / "point.pt")
    for found in (point, ScaledPosterior.from_state_dict(torch.load(tmp_path / "point.pt", weights_only=True))):
        assert equal(found.sample(), point.mean)
        assert not joint(found.variance()).any()
        assert (found.entropy(), found.kl()) == (-math.inf, math.inf)
        with pytest.raises(PosteriorError, match=r"scale 0 is a point without a density\. Use posterior\.posterior"):
            found.log_prob(point.mean)


@pytest.mark.parametrize("scale", [-0.1, math.inf, math.nan])
def test_a_width_out_of_range_is_refused(generator, scale):
    with pytest.raises(PosteriorError, match=rf"scale={scale} must be at least 0 and finite"):
        ScaledPosterior(build("full", generator)[0], scale)


# -- features of one family ---------------------------------------------------------------------------------------------


def test_groups_of_a_convolution_are_independent_blocks(generator):
    layer = nn.Conv1d(4, 6, 2, groups=2).double()
    values = {n: p.detach() for n, p in layer.named_parameters()}
    factors = spd(3, 2, generator=generator), spd(5, 2, generator=generator)
    prior = {"weight": 1.0, "bias": 1.0}
    q = MatrixGaussian(values, {"weight": factors}, {"weight": "bias"}, {}, prior, num_data=1)
    dense = torch.block_diag(*KroneckerProduct(*factors).dense())
    weights = q.sample(generator)
    away = {n: weights[n] - values[n] for n in values}
    flat = layer_matrix(away["weight"], away["bias"], groups=2).flatten()
    torch.testing.assert_close(q.squared_distance(weights), flat @ dense @ flat)
    torch.testing.assert_close(q.log_det_precision(), torch.logdet(dense))
    variance = layer_matrix(q.variance()["weight"], q.variance()["bias"], groups=2)
    torch.testing.assert_close(variance.flatten(), torch.linalg.inv(dense).diagonal())


def test_layers_without_bias_and_mean_field_weights_live_together(generator):
    values = {"w": torch.zeros(2, 3, dtype=F64), "scale": torch.ones(2, dtype=F64)}
    factors = spd(2, generator=generator), spd(3, generator=generator)
    precision = {"scale": torch.tensor([4.0, 9.0], dtype=F64)}
    q = MatrixGaussian(values, {"w": factors}, {}, precision, {"w": 1.0, "scale": 2.0}, num_data=1)
    dense = torch.block_diag(torch.kron(*factors), torch.diag(precision["scale"]))
    truth = MultivariateNormal(torch.cat([v.flatten() for v in values.values()]), precision_matrix=dense)
    weights = q.sample(generator)
    torch.testing.assert_close(q.log_prob(weights), truth.log_prob(torch.cat([w.flatten() for w in weights.values()])))
    assert list(weights) == ["w", "scale"]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_tensors_undo_layer_matrix(generator, groups, has_bias):
    weight, bias = torch.randn(4, 3, 2, generator=generator), torch.randn(4, generator=generator)
    matrix = layer_matrix(weight, bias if has_bias else None, groups)
    found, column = layer_tensors(matrix, weight.shape, has_bias)
    assert torch.equal(found, weight)
    assert torch.equal(column, bias) if has_bias else column is None


def test_the_precision_without_curvature_is_the_priors():
    """τ does not temper the prior: (Ñ/τ) √δ̃ √δ̃ = δ."""
    nothing = KroneckerProduct(torch.zeros(2, 2, dtype=F64), torch.zeros(3, 3, dtype=F64))
    found = kronecker_precision(nothing, scale=40 / 0.1, damping=3.0 * 0.1 / 40)
    torch.testing.assert_close(found.dense(), 3 * torch.eye(6, dtype=F64))


def test_the_precision_by_hand():
    """1 × 1, S = 4, A = 1, Ñ/τ = 200, δ̃ + γ = 4/200 + 0.02 = 0.04, π = ½: 200 (4 + 0.4)(1 + 0.1) = 968."""
    curvature = KroneckerProduct(torch.tensor([[4.0]]), torch.tensor([[1.0]]))
    found = kronecker_precision(curvature, scale=200, damping=0.04)
    torch.testing.assert_close(found.dense(), torch.tensor([[968.0]]))


@pytest.mark.parametrize("name", ["factors", "links"])
def test_factors_of_another_shape_are_named(generator, name):
    state = build("block_tridiagonal", generator)[0].state_dict()
    wrong = dict(state[name])
    wrong["net.0.weight"] = (torch.eye(5), torch.eye(5))
    with pytest.raises(PosteriorError, match=r"do not match for net\.0\.weight\.$"):
        BlockTridiagonal.from_state_dict({**state, name: wrong})


def test_matrix_factors_of_another_shape_are_named(generator):
    state = build("matrix", generator)[0].state_dict()
    state["factors"] = {**state["factors"], "net.2.weight": (torch.eye(2), torch.eye(3))}
    with pytest.raises(PosteriorError, match=r"do not match for net\.2\.weight\.$"):
        MatrixGaussian.from_state_dict(state)


def test_a_full_precision_of_another_size_is_shown(generator):
    state = build("full", generator)[0].state_dict()
    with pytest.raises(
        PosteriorError, match=r"The 17 weights net\.0.* need a precision \[17, 17\], but it is \[3, 3\]"
    ):
        FullGaussian.from_state_dict({**state, "precision": torch.eye(3)})


def test_a_model_too_large_for_a_full_covariance_is_told_the_memory():
    """11.2e6² · 4 B = 5.018e14 B = 456.3 · 2⁴⁰ B."""
    params = {"w": torch.empty(11_200_000, device="meta")}
    message = r"of 11,200,000 weights, .* would take 456\.3 TiB, more than limit_mib=1024\. Use MatrixGaussian or MeanF"
    with pytest.raises(PosteriorError, match=message):
        check_full_size(params)
    check_full_size({"w": torch.empty(1000)})


def test_a_chain_too_large_is_told_the_memory():
    """2 layers of 100 → 100: 2 (100² + 101²) for layers and 100² + 101² for the link, times 4 B = 236.7 KiB."""
    net = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
    message = (
        r"factors of 2 linear layers and of the pairs of neighbours would take 236\.7 KiB, more than limit_mib=0\.1"
    )
    with pytest.raises(PosteriorError, match=message):
        linear_chain(net, limit_mib=0.1)
    assert linear_chain(net) == ["0", "2"]


def test_models_that_are_no_chain_are_refused_by_layer():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(4, 1))
    message = r"Sequential has 1 \(BatchNorm1d\), 2 \(4 inputs after the 3 outputs of 0\)\. Use MatrixGaussian"
    with pytest.raises(PosteriorError, match=message):
        linear_chain(net)
    with pytest.raises(PosteriorError, match=r"but ReLU has none"):
        linear_chain(nn.ReLU())


def test_a_chain_of_one_layer_is_a_matrix_gaussian(generator):
    own, _ = chain(SIDES[:1], generator)
    values = {n: v for n, v in mean(generator).items() if n.startswith("net.0.")}
    prior, biases = {n: PRIOR[n] for n in values}, {"net.0.weight": "net.0.bias"}
    single = BlockTridiagonal(values, {"net.0.weight": own[0]}, {}, biases, prior, 5)
    matrix = MatrixGaussian(values, {"net.0.weight": own[0]}, biases, {}, prior, 5)
    weights = matrix.sample(generator)
    torch.testing.assert_close(single.log_prob(weights), matrix.log_prob(weights))
    torch.testing.assert_close(single.kl(), matrix.kl())


def test_the_covariance_is_factorised_once(generator, monkeypatch):
    q, calls, of = build("block_tridiagonal", generator)[0], [], BlockTridiagonalInverse.of
    monkeypatch.setattr(BlockTridiagonalInverse, "of", lambda *a: calls.append(1) or of(*a))
    for _ in range(3):
        q.sample(generator)
    assert len(calls) == 1
