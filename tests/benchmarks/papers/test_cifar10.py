"""The CIFAR-10 benchmark on twenty images: every method, every network's settings, the table and what it keeps."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fake_images import write_cifar10, write_image_folder
from torch import nn
from torch.optim import SGD, Adam
from torchvision.datasets import CIFAR10

from benchmarks.papers import PUBLISHED
from benchmarks.papers.cifar10 import runs
from benchmarks.papers.cifar10.__main__ import main, table
from benchmarks.papers.cifar10.networks import METHODS, NETWORKS, callback, dropout_layers, optimizer, why_not
from benchmarks.resuming import Unfinished
from lightning_bayes.zoo import BayesClassifier


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with CIFAR-10, and images out of distribution in ``outside``."""
    for name, value in write_cifar10(tmp_path).items():
        monkeypatch.setattr(CIFAR10, name, value)
    write_image_folder(tmp_path / "outside", ("only",), count=8)
    return tmp_path


def asked(root, *more):
    ood = str(root / "outside")
    start = ["--root", str(root), "--epochs", "1", "--accelerator", "cpu", "--ood", ood, "--json", str(root / "r.json")]
    return [*start, *more]


def record(method="adam", seed=0, accuracy=0.5, model="lenet"):
    metrics = {"test/cls/Acc": accuracy, "test/cls/NLL": 1.25}
    run = {"model": model, "method": method, "settings": "default", "augment": False, "epochs": 3, "seed": seed}
    return {**run, "metrics": metrics, "cpu_seconds": 1.0}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_lenet_and_is_measured(method, root):
    epochs = 2 if method == "swag" else 1  # a mean of iterates needs two
    main(asked(root, "--methods", method, "--epochs", str(epochs)))
    (found,) = json.loads((root / "r.json").read_text("utf-8"))["runs"]
    assert (found["method"], found["epochs"], found["ood"]) == (method, epochs, ["outside"])
    correct = 10 * found["metrics"]["test/cls/Acc"]  # of ten test images
    assert math.isclose(correct, round(correct), abs_tol=1e-5)
    assert 0 <= found["metrics"]["ood/AUROC"] <= 1


def test_a_finished_run_is_not_repeated(root, capsys):
    main(asked(root, "--methods", "adam"))
    first = json.loads((root / "r.json").read_text("utf-8"))
    main(asked(root, "--methods", "adam", "sgd"))
    second = json.loads((root / "r.json").read_text("utf-8"))
    assert second["runs"][0] == first["runs"][0]
    assert [run["method"] for run in second["runs"]] == ["adam", "sgd"]
    assert "*Osawa et al.*" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["adam", "vogn", "mc_dropout"])
def test_a_run_stopped_at_the_deadline_goes_on_to_the_same_result(method, root):
    def finished(**where):
        machine = runs.Machine(str(root), accelerator="cpu", **where)
        return runs.train_and_test(runs.Run("lenet", method, "default", False, 3, 0), machine)["metrics"]

    for epochs in (1, 2):
        with pytest.raises(Unfinished, match=f"{epochs} of 3 epochs"):
            finished(work=root / "work", deadline=0.0)
    assert finished(work=root / "work") == pytest.approx(finished(), rel=0, abs=0, nan_ok=True)


def test_the_command_says_where_it_stopped(root, capsys):
    main(asked(root, "--methods", "adam", "sgd", "--epochs", "2", "--work", str(root / "work"), "--minutes", "0"))
    assert "lenet-adam-default-False-2-0: 1 of 2 epochs are done; run the command again" in capsys.readouterr().out


def test_the_temperature_of_each_half_is_scored_on_the_other(generator):
    """Logits that are three times too large have the temperature 3, and then the NLL of the right ones."""
    logits = torch.randn(1, 20_000, 4, generator=generator)
    targets = torch.distributions.Categorical(logits=logits[0]).sample()
    collected = runs.Logits()
    collected.batches = [(3 * logits[:, :7000], targets[:7000]), (3 * logits[:, 7000:], targets[7000:])]
    found = collected.with_temperature()
    assert found["tempered/temperature"] == pytest.approx(3, rel=0.05)
    assert found["tempered/cls/NLL"] == pytest.approx(float(nn.functional.cross_entropy(logits[0], targets)), abs=1e-3)


def test_a_setting_that_nobody_published_is_not_run(root, capsys):
    main(asked(root, "--methods", "bbb", "--settings", "published"))
    assert "not run: no published setting" in capsys.readouterr().out


@pytest.mark.parametrize("settings", ["default", "l2", "published"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", NETWORKS)
def test_every_cell_of_the_table_can_be_built_or_says_why_not(model, method, settings):
    network = NETWORKS[model]
    assert (network.name, network.build()(torch.zeros(2, 3, 32, 32)).shape) == (network.name, (2, 10))
    if why_not(model, method, settings):
        assert settings == "published"
        return
    task = BayesClassifier(nn.Linear(2, 2), num_classes=2)
    beside = callback(network, method, settings, task, 10.0, seed=0)
    assert (beside is None) == (method in {"sgd", "adam", "ensemble"})
    own = optimizer(network, method, settings)(task.parameters())
    assert isinstance(own, SGD if method == "sgd" else Adam)


PENALTIES = [("adam", "published", 0.01), ("vogn", "published", 0), ("vogn", "l2", 0.01), ("adam", "default", 0)]


@pytest.mark.parametrize(("method", "settings", "penalty"), PENALTIES)  # VOGN as published has a prior instead
def test_the_published_adam_of_lenet_has_the_papers_penalty(method, settings, penalty):
    own = optimizer(NETWORKS["lenet"], method, settings)([nn.Parameter(torch.zeros(1))])
    assert own.param_groups[0]["weight_decay"] == penalty


@pytest.mark.parametrize(("model", "count"), [("lenet", 5), ("alexnet", 5), ("vgg16", 14)])
def test_dropout_follows_the_papers_layers(model, count):
    """All layers of LeNet-5 and VGG16; AlexNet's convolutions, not its last layer."""
    network = NETWORKS[model]
    names = dropout_layers(network.build(), network.drops).split("|")
    assert len(names) == count


def test_the_table_has_means_with_standard_errors_beside_the_papers_rows():
    lines = table([record(seed=0, accuracy=0.5), record(seed=1, accuracy=0.6), record("vogn")]).splitlines()
    adam = next(line for line in lines if "| Adam | default" in line)
    assert "0.5500 ± 0.0500 | 1.2500 ± 0.0000 | – |" in adam  # the standard deviation of .5 and .6 is .1 / √2
    assert adam.endswith("| 3 | 1.0 | 2 |")
    assert sum("*Osawa et al.*" in line for line in lines) == len(PUBLISHED["cifar10"]["lenet, not augmented"])
    assert not any("alexnet" in line for line in lines)
    published = next(line for line in lines if "*VOGN* | *Osawa et al.*" in line)
    assert "| 0.6732 | 0.938 | 0.046 | 0.8 |" in published
