"""Posterior files of any module: rebuilt from hyperparameters or a factory, or passed; never by code not allowed."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from of_classes import mc_predict, save_posterior
from posterior_around import mean_field_around
from torch import nn

from lightning_bayes import Predictor, zoo
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.zoo import load

HERE = __name__


class Net(LightningModule):
    def __init__(self, width, classes=2):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, x):
        return self.body(x)


class Bare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, x):
        return self.layer(x)


class NoArguments(Bare):
    def __init__(self):
        super().__init__(3)


def build(width):
    return Bare(width)


def build_text():
    return "no network"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, HERE, sys.modules.get(HERE) or sys.modules[Net.__module__])


def saved(folder, model, **options):
    posterior = mean_field_around(model)
    card = save_posterior(folder / "own.safetensors", model, posterior, **options)
    return folder / "own.safetensors", posterior, card.read_text("utf-8")


def assert_predicts(path, network, posterior, generator, **options):
    x = torch.randn(4, 3, generator=generator)
    found = Predictor.load(path, samples=3, **options)(x)
    torch.testing.assert_close(found.probs, mc_predict(network, posterior, x, samples=3).probs)


def test_a_lightning_module_is_built_by_its_hyperparameters(tmp_path, generator):
    model = Net(width=5)
    path, posterior, card = saved(tmp_path, model, class_names=["no", "yes"])
    assert_predicts(path, Net(5), posterior, generator, allow=HERE)
    assert f"`{HERE}:Net(width=5, classes=2)`" in card
    found = load(path, allow=HERE)
    assert not found.model.training
    assert all(torch.equal(p, posterior.mean[n]) for n, p in found.model.named_parameters())


def test_a_factory_builds_the_network(tmp_path, generator):
    path, posterior, card = saved(tmp_path, Bare(3), factory=f"{HERE}:build", arguments={"width": 3})
    assert_predicts(path, Bare(3), posterior, generator, allow=[HERE])
    assert f"`{HERE}:build(width=3)`" in card


def test_a_class_without_arguments_needs_no_factory(tmp_path, generator):
    path, posterior, _ = saved(tmp_path, NoArguments())
    assert_predicts(path, NoArguments(), posterior, generator, allow=HERE)


def test_a_model_can_be_passed(tmp_path, generator):
    path, posterior, card = saved(tmp_path, Bare(3))
    with pytest.raises(PosteriorError, match=r"Bare without its constructor arguments.*load\(path, model=\.\.\.\)"):
        load(path, allow=HERE)
    assert_predicts(path, Bare(3), posterior, generator, model=Bare(3))
    assert 'Predictor.load("own.safetensors", model=network)' in card
    with pytest.raises(PosteriorError, match=r"of another shape: layer\.weight"):
        load(path, model=Bare(4))


def test_the_card_of_a_class_of_a_script_passes_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(NoArguments, "__module__", "__main__")
    *_, card = saved(tmp_path, NoArguments())
    assert 'Predictor.load("own.safetensors", model=network)' in card


def test_only_allowed_code_runs(tmp_path, monkeypatch):
    path, *_ = saved(tmp_path, Bare(3), factory="subprocess:check_output", arguments={"args": ["true"]})
    ran = []
    monkeypatch.setattr("subprocess.check_output", lambda **arguments: ran.append(arguments))
    for allow in ((), "sub", "my_package"):
        with pytest.raises(
            PosteriorError, match=r"code outside this package.* If you trust this code.*allow='subprocess'"
        ):
            load(path, allow=allow)
    assert not ran


def test_a_missing_package_is_imported_only_if_allowed(tmp_path):
    path, *_ = saved(tmp_path, Bare(3), factory="nowhere.models:build", arguments={})
    with pytest.raises(PosteriorError, match="allow='nowhere'"):
        load(path)
    with pytest.raises(PosteriorError, match=r"did not build the network \(ModuleNotFoundError.*model=\.\.\."):
        load(path, allow="nowhere")


def test_a_factory_must_return_a_network(tmp_path):
    path, *_ = saved(tmp_path, Bare(3), factory=f"{HERE}:build_text", arguments={})
    with pytest.raises(PosteriorError, match="returned a str, not a network"):
        load(path, allow=HERE)


@pytest.mark.parametrize("factory", ["build", "a:b:c", "a.b", "a:b()", "../a:b", ""])
def test_a_factory_is_an_import_path(tmp_path, factory):
    with pytest.raises(HyperparameterError, match=re.escape(f"factory={factory!r} must have the form")):
        saved(tmp_path, Bare(3), factory=factory)


@pytest.mark.parametrize("model", [Bare(3), zoo.create_model("mlp", 2, 1, image_size=1)], ids=["class", "zoo model"])
def test_arguments_need_a_factory(tmp_path, model):
    with pytest.raises(HyperparameterError, match="arguments require a factory"):
        saved(tmp_path, model, arguments={"width": 3})


def test_hyperparameters_that_are_objects_are_listed(tmp_path):
    model = Net(width=5)
    model.hparams["width"] = nn.Linear(1, 1)
    with pytest.raises(HyperparameterError, match=r"architecture\.arguments\.width \(Linear\)"):
        saved(tmp_path, model)


def test_a_passed_model_replaces_the_zoo_model(tmp_path, generator):
    built = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=1, hidden=())
    path, posterior, _ = saved(tmp_path, built)
    other = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=1, hidden=())
    assert load(path, model=other).model is other
    assert torch.equal(next(other.parameters()), next(iter(posterior.mean.values())))
