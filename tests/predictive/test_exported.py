"""The exported predictive against mc_predict with the same samples, for batches of any size."""

from __future__ import annotations

import pytest
import torch
from of_classes import MonteCarloNetwork, export, mc_predict, save_posterior
from torch import nn

from lightning_bayes import MeanField, Predictor, predictive, zoo
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.likelihood import Categorical, Likelihood, Poisson, PredictedGaussian, ScoredOutput
from lightning_bayes.posteriors import ScaledPosterior

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def network(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8, classes))
    )


def posterior_of(model, noisy=lambda name: True):
    mean = {n: p.detach().clone() for n, p in model.named_parameters() if noisy(n)}
    constants = {n: v.clone() + 0.5 for n, v in model.state_dict().items() if n not in mean and v.is_floating_point()}
    constants |= {n: v.clone() for n, v in model.state_dict().items() if not v.is_floating_point()}
    return MeanField(
        mean, {n: torch.full_like(m, 9.0) for n, m in mean.items()}, dict.fromkeys(mean, 1.0), 10, constants
    )


def expected(model, posterior, x, **options):
    found = mc_predict(model, posterior, x, **options)._asdict()
    return [value for name, value in found.items() if name not in {"sample_probs", "samples"}]


@pytest.mark.parametrize(
    ("link", "classes", "options"),
    [("softmax", 3, {"temperature": 1.7, "seed": 2}), ("sigmoid", 3, {}), ("identity", 1, {"seed": 5})],
)
def test_the_network_matches_mc_predict(link, classes, options, generator):
    model = network(classes).train()
    posterior, x = posterior_of(model), torch.randn(4, 1, 4, 4, generator=generator)
    found = MonteCarloNetwork(model, posterior, 5, link=link, **options).eval()(x)
    wanted = expected(model, posterior, x, samples=5, link=link, **options)
    torch.testing.assert_close(list(found), wanted, **CLOSE)
    assert model.training


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = network()
    posterior = posterior_of(model, noisy=lambda name: not name.startswith("0"))
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    return export(model, posterior, path, torch.zeros(1, 1, 4, 4), samples=3, seed=1), model, posterior


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_file_matches_mc_predict_for_any_batch_size(exported, batch, generator):
    file, model, posterior = exported
    x = torch.randn(batch, 1, 4, 4, generator=generator)
    found = torch.export.load(file.path).module()(x)
    assert file.outputs == ("probs", "entropy", "mutual_information")
    torch.testing.assert_close(list(found), expected(model, posterior, x, samples=3, seed=1), **CLOSE)


def test_the_model_is_unchanged_and_copies_share_deterministic_tensors():
    model = network().train()
    posterior = posterior_of(model, noisy=lambda name: not name.startswith("0"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = MonteCarloNetwork(model, posterior, 2).networks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert first[0].weight is second[0].weight
    assert not torch.equal(first[5].weight, second[5].weight)
    torch.testing.assert_close(first[0].weight, posterior.constants["0.weight"])
    assert not any(module.training for module in first.modules())


def test_a_predictor_exports_its_own_samples(tmp_path, generator):
    model = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=4, hidden=())
    transform = zoo.ImageTransform(4, mean=(0.5,), std=(0.5,))
    save_posterior(tmp_path / "q.safetensors", model, posterior_of(model), transform=transform, temperature=2.0)
    predict = Predictor.load(tmp_path / "q.safetensors", samples=3, seed=4)
    network = torch.export.load(predict.export(tmp_path / "q.pt2").path).module()
    x = torch.randn(5, 1, 4, 4, generator=generator)
    torch.testing.assert_close(list(network(x)), list(predict(x)[:3]), **CLOSE)


def test_onnx_predicts_the_same(tmp_path, generator):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package}, of the extra `onnx` or to run its files, is not installed")
    import onnxruntime

    model = network()
    posterior = posterior_of(model)
    file = export(model, posterior, tmp_path / "net.onnx", torch.zeros(2, 1, 4, 4), samples=3)
    session = onnxruntime.InferenceSession(str(file.path))
    assert tuple(output.name for output in session.get_outputs()) == file.outputs
    ((name, shape),) = [(value.name, value.shape) for value in session.get_inputs()]
    assert (name, shape) == ("input", ["batch", 1, 4, 4])  # the argument of nn.Sequential.forward
    assert {value.shape[0] for value in session.get_outputs()} == {"batch"}
    for batch in (1, 6):
        x = torch.randn(batch, 1, 4, 4, generator=generator)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close([torch.tensor(f) for f in found], expected(model, posterior, x, samples=3), **CLOSE)


class Heads(nn.Module):
    """Logits, a mean and its log variance, a rate, a value that no loss takes, and what is no tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 8)

    def forward(self, x, z):
        logits, noisy, rate, extra = self.head((self.body(x) + z).tanh()).split([3, 2, 1, 2], -1)
        return {"logits": logits, "noisy": noisy, "more": (rate, extra), "name": "heads"}


HEADS = Likelihood(
    (
        ScoredOutput((("logits",),), Categorical(1)),
        ScoredOutput((("noisy",),), PredictedGaussian("log_variance")),
        ScoredOutput((("more", 0),), Poisson()),
    )
)
OF_HEADS = (
    *("logits_probs", "logits_entropy", "logits_mutual_information", "noisy_mean", "noisy_variance"),
    *("more_output_0_mean", "more_output_0_variance", "more_output_1_mean", "more_output_1_variance"),
)


def wanted_of_heads(found):
    """The results of `mc_predict` in the order of `OF_HEADS`; the variance of values with noise is the epistemic one."""
    noisy, (rate, extra) = found["noisy"], found["more"]
    logits = [found["logits"].probs, found["logits"].entropy, found["logits"].mutual_information]
    return [*logits, noisy.mean, noisy.epistemic, rate.mean, rate.epistemic, extra.mean, extra.variance]


def test_several_outputs_are_each_exported_by_their_likelihood(tmp_path, generator):
    model = Heads()
    posterior = posterior_of(model).with_likelihood(HEADS)
    options = {"samples": 3, "seed": 1, "temperature": 1.4}
    inputs = (torch.zeros(1, 4), torch.zeros(1, 6))
    file = predictive.export(model, posterior, tmp_path / "heads.pt2", inputs, **options)
    assert file.outputs == OF_HEADS
    for batch in (1, 5):
        x, z = torch.randn(batch, 4, generator=generator), torch.randn(batch, 6, generator=generator)
        wanted = wanted_of_heads(predictive.mc_predict(model, posterior, (x, z), **options))
        torch.testing.assert_close(list(torch.export.load(file.path).module()(x, z)), wanted, **CLOSE)


def test_onnx_names_several_outputs_by_their_place(tmp_path, generator):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package}, of the extra `onnx` or to run its files, is not installed")
    import onnxruntime

    model = Heads()
    posterior = posterior_of(model).with_likelihood(HEADS)
    file = predictive.export(model, posterior, tmp_path / "heads.onnx", (torch.zeros(2, 4), torch.zeros(2, 6)), 3)
    session = onnxruntime.InferenceSession(str(file.path))
    assert tuple(output.name for output in session.get_outputs()) == file.outputs == OF_HEADS
    x, z = torch.randn(5, 4, generator=generator), torch.randn(5, 6, generator=generator)
    found = session.run(None, {"x": x.numpy(), "z": z.numpy()})
    wanted = wanted_of_heads(predictive.mc_predict(model, posterior, (x, z), 3))
    torch.testing.assert_close([torch.tensor(each) for each in found], wanted, **CLOSE)


class TwoParts(nn.Linear):
    """A mean and a variance beside each other, in a dictionary with more."""

    def forward(self, x):
        mean, raw = super().forward(x).chunk(2, -1)
        return {"mean": mean, "variance": nn.functional.softplus(raw), "hidden": x}


def test_a_mean_and_its_variance_in_two_entries_are_one_output(tmp_path, generator):
    model, x = TwoParts(4, 2), torch.randn(5, 4, generator=generator)
    known = Likelihood((ScoredOutput((("mean",), ("variance",)), PredictedGaussian("variance")),))
    posterior = posterior_of(model).with_likelihood(known)
    file = predictive.export(model, posterior, tmp_path / "two.pt2", torch.zeros(1, 4), 3)
    assert file.outputs == ("mean", "variance")
    wanted = predictive.mc_predict(model, posterior, x, 3)
    found = torch.export.load(file.path).module()(x)
    torch.testing.assert_close(list(found), [wanted.mean, wanted.epistemic], **CLOSE)


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


def test_a_model_that_cannot_be_traced_is_named(tmp_path):
    model = Branches(2, 3)
    with pytest.raises(
        UnsupportedLayerError, match=r"Branches cannot be exported as \.pt2 \(.*avoid branches on values"
    ):
        export(model, posterior_of(model), tmp_path / "a.pt2", torch.zeros(2, 2), samples=2)
    assert list(tmp_path.iterdir()) == []


def test_unsupported_exports_are_refused(tmp_path, monkeypatch):
    model, x = nn.Linear(2, 3), torch.zeros(2, 2)
    posterior = posterior_of(model)
    with pytest.raises(HyperparameterError, match=r"a\.h5: the predictive can be exported as \.pt2 .* or \.onnx"):
        export(model, posterior, tmp_path / "a.h5", x)
    with pytest.raises(HyperparameterError, match="samples=0"):
        export(model, posterior, tmp_path / "a.pt2", x, samples=0)
    with pytest.raises(HyperparameterError, match="linearised predictive"):
        export(model, ScaledPosterior(posterior, 0.5, linearized=True), tmp_path / "a.pt2", x)
    monkeypatch.setattr("lightning_bayes.predictive.exported.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'onnx and onnxscript.*"lightning-bayes\[onnx\]", or export a \.pt2'):
        export(model, posterior, tmp_path / "a.onnx", x)
