"""Each part of the GPU program on a CPU, for one batch or epoch."""

from __future__ import annotations

import json

import pytest
import torch
from fake_images import write_cifar10
from torch import nn
from torchvision.datasets import CIFAR10

from benchmarks import gpu
from benchmarks.papers.cifar10 import runs
from benchmarks.speed import fits

SMOKE = ["--device", "cpu", "--smoke"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name, value in write_cifar10(tmp_path).items():
        monkeypatch.setattr(CIFAR10, name, value)
    return tmp_path


def test_speed_times_every_method_with_every_number_format_and_goes_on(tmp_path, monkeypatch):
    tiny = fits.Network("LeNet-5", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), 10)
    monkeypatch.setitem(fits.NETWORKS, "lenet5", tiny)
    arguments = ["speed", "--out", str(tmp_path), "--networks", "lenet5", *SMOKE]
    gpu.main([*arguments, "--minutes", "0"])  # the time is over before the first cell
    assert not list(tmp_path.glob("*.json"))
    gpu.main(arguments)
    for numbers in ("fp32", "tf32", "bf16"):
        found = json.loads((tmp_path / f"speed_lenet5_{numbers}.json").read_text("utf-8"))
        assert {*found["seconds"]["lenet5"]} == {*fits.METHODS}
    monkeypatch.setattr(gpu.benchmark, "main", None)
    gpu.main(arguments)


@pytest.mark.parametrize("network", ["resnet18", "vit_small"])
def test_the_large_networks_take_an_update(network):
    assert fits.cost_per_update("VOGN", fits.NETWORKS[network]._replace(updates=1), batch=2).seconds > 0


@pytest.mark.parametrize(("part", "model"), [("osawa", "resnet18"), ("vgg16", "vgg16"), ("resnet20", "resnet20")])
def test_the_image_parts_run_every_method_for_an_epoch(part, model, root, monkeypatch):
    for name in ("OSAWA", "ZHANG", "SHEN"):  # one method of each setting: the others are tested with the program itself
        for methods in getattr(gpu, name).values():
            monkeypatch.setattr(gpu, name, {})
            del methods[1:]
    gpu.main([part, "--out", str(root / "out"), "--root", str(root), *SMOKE])
    found = json.loads((root / "out" / f"{model}.json").read_text("utf-8"))["runs"]
    assert {run["settings"] for run in found} == {"published", "default"}


def test_the_text_and_the_tests_part_start(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 80, "utf-8")
    gpu.main(["war_and_peace", "--out", str(tmp_path), "--text", str(tmp_path / "text.txt"), *SMOKE])
    assert "| Adam, 2.5e-3 | 1 | 1 |" in capsys.readouterr().out
    gpu.main(["tests", "--out", str(tmp_path), *SMOKE])
    assert "test_nccl" in (tmp_path / "tests.txt").read_text("utf-8")


def test_images_on_a_device_are_those_of_the_data_module(root):
    data = runs.CIFAR10DataModule(str(root), val_size=0)
    data.read_sets("fit")
    loader = runs.device_loader(str(root), 20, augment=False, device="cpu")
    ((images, targets),) = loader
    expected = {int(x[0, 5, 5] * 1e4): x for x, _ in data.train_set}
    for image in images:
        torch.testing.assert_close(image, expected[int(image[0, 5, 5] * 1e4)])
    assert sorted(targets.tolist()) == sorted(int(y) for _, y in data.train_set)


def test_crops_are_windows_of_the_padded_image_mirrored_half_of_the_time(generator):
    torch.manual_seed(0)
    image = torch.arange(1, 3 * 8 * 8 + 1).view(1, 3, 8, 8)
    padded = torch.nn.functional.pad(image, [4] * 4)[0]
    windows = [padded[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
    every = {tuple(w.flatten().tolist()): k for w in windows for k, w in ((0, w), (1, w.flip(2)))}
    crops = runs.crop_and_mirror(image.expand(400, -1, -1, -1))
    kinds = [every[tuple(crop.flatten().tolist())] for crop in crops]
    assert 150 < sum(kinds) < 250  # five standard errors
