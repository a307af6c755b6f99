"""The fine-tuning benchmark on a few images: its data, its methods and its records."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.finetune import data, networks
from benchmarks.finetune.__main__ import main
from benchmarks.finetune.methods import METHODS, Adaptation, results
from benchmarks.finetune.networks import NETWORKS, Network
from lightning_bayes.zoo import create_model

SHOTS = 64


@pytest.fixture
def arrays(monkeypatch):
    """Image i of a set is filled with i and has class i modulo 10."""
    for name, count in (("VALIDATION", 20), ("TEST", 30), ("OOD", 20)):
        monkeypatch.setattr(data, name, count)
    monkeypatch.setattr(networks, "DEVICE", torch.device("cpu"))
    ids = np.arange(250, dtype=np.uint8)
    images = np.broadcast_to(ids[:, None, None, None], (250, 32, 32, 3))
    return {f"{name}{end}": part for name in data.SIZES for end, part in (("", images), ("_y", ids % 10))}


def tiny(num_classes, **arguments):
    """A convolution with BatchNorm."""
    return create_model("lenet5", num_classes, image_size=32, norm="batch", **arguments)


def ids(x):
    """The number of each image."""
    return ((x[:, 0, 0, 0] * 0.25 + 0.47) * 255).round().long()


@pytest.mark.parametrize("name", data.TARGETS)
def test_no_image_has_two_parts(arrays, name):
    arrays["cifar_test"] = arrays["svhn"]
    images = data.target(arrays, name, 40, seed=1)
    parts = [set(ids(x).tolist()) for x in (images.train_x, images.val_x)]
    parts += [set(ids(images.test_x).tolist())] if name == "svhn" else []  # CIFAR-10 has test images of its own
    assert sum(map(len, parts)) == len(set.union(*parts))
    classes = torch.tensor(data.TARGETS[name])
    assert torch.equal(classes[images.train_y], ids(images.train_x) % 10)
    assert torch.equal(classes[images.test_y], ids(images.test_x) % 10)


def test_pretraining_has_no_class_of_the_adaptation(arrays):
    x, y = data.pretraining(arrays)
    assert torch.equal(torch.tensor(data.FAMILIAR)[y], ids(x) % 10)
    assert not set(data.FAMILIAR) & set(data.TARGETS["cifar"])


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_the_last_layer_that_its_pattern_names(name):
    network = NETWORKS[name]
    names = [n for n, _ in network.create(3, network.create(7, None).state_dict()).named_parameters()]
    assert [n for n in names if re.search(rf"^{network.head}\.", n)] == [
        f"{network.head}.weight",
        f"{network.head}.bias",
    ]


@pytest.mark.filterwarnings("ignore:The search for the prior precision")  # of labels that no image determines
def test_every_method_predicts_under_its_samples(arrays):
    images = data.target(arrays, "svhn", SHOTS, seed=0)
    network = Network(tiny, "fc3", 1e-3)
    job = Adaptation(network, network.create(7, None).state_dict(), images, seed=0, epochs=2)
    found = {method: logits for method, logits, _ in results(job, list(METHODS))}
    assert list(found) == list(METHODS)
    counts = {"user": 1, "three": 3}
    for method, logits in found.items():
        assert logits.test.shape == (counts.get(method, 10), 30, 10)
        assert logits.test.isfinite().all()
    torch.testing.assert_close(found["three"].test[:1], found["user"].test)
    torch.testing.assert_close(found["laplace_head"].test.mean(0), found["user"].test[0], rtol=0.01, atol=0.05)


def test_the_command_keeps_what_it_measured_and_repeats_nothing(arrays, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(NETWORKS, "resnet18", Network(tiny, "fc3", 1e-3))
    np.savez(tmp_path / "images.npz", **arrays)
    asked = ["--images", str(tmp_path / "images.npz"), "--networks", "resnet18", "--targets", "svhn", "--seeds", "0"]
    asked += ["--shots", str(SHOTS), "--pretrain-epochs", "1", "--json", str(tmp_path / "r.json"), "--methods", "user"]
    main(asked)
    first = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    main([*asked, "vogn_head"])
    second = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    assert second[0] == first[0]
    assert [run["method"] for run in second] == ["user", "vogn_head"]
    capsys.readouterr()
    main([*asked, "--table"])
    assert "| resnet18 svhn 64 | user T | 1 |" in capsys.readouterr().out


def test_the_network_of_a_batch_norm_is_one():
    assert any(isinstance(m, nn.BatchNorm2d) for m in NETWORKS["resnet18"].create(3, None).modules())
    assert any(isinstance(m, nn.LayerNorm) for m in NETWORKS["vit"].create(3, None).modules())
