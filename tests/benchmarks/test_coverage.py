"""The sweep over models of other packages: its judge notices what is wrong, and a sample of it is right."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.__main__ import main, table
from benchmarks.coverage.families import FAMILIES
from benchmarks.coverage.judge import Case, Verdict, judge, shorten

pytestmark = pytest.mark.filterwarnings("ignore")


def case(model):
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.arange(4) % 2]
    return Case(model.double(), batch, lambda b: F.cross_entropy(model(b[0]), b[1]))


def test_a_linear_layer_is_right():
    assert judge(case(nn.Linear(3, 2))) == Verdict("right")


class NormThenPositions(nn.Module):
    """PyTorch's gradient of the BatchNorm is wrong for a batch of one, whose output gradient is transposed in memory."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
        self.head = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))

    def forward(self, x):
        grid = x[:, :, None, None] * torch.linspace(-1, 1, 25, dtype=x.dtype).view(5, 5)
        return self.head(self.body(grid).flatten(2).transpose(1, 2)).tanh().mean(1)


def test_a_gradient_that_is_wrong_in_batches_of_one_is_no_truth():
    assert judge(case(NormThenPositions())) == Verdict("right")


def test_wrong_squares_are_noticed(monkeypatch):
    from lightning_bayes.curvature.capture import Capture

    monkeypatch.setattr(
        Capture, "scaled_squares", lambda self, factor: {p: s * 2 * factor for p, s in self.squares.items()}
    )
    assert judge(case(nn.Linear(3, 2))).word == "wrong"


class Caching(nn.Linear):
    """Caches a product with a graph in evaluation until the next call of `train`, as LeViT of timm does its biases."""

    cache = None

    def train(self, mode=True):
        self.cache = None
        return super().train(mode)

    def forward(self, x):
        self.cache = self.weight * 2 if self.cache is None else self.cache
        return x @ self.cache.T


def test_a_network_that_caches_a_graph_has_a_truth():
    assert judge(case(Caching(3, 2))).word in {"right", "refused"}


class Crashing(nn.Linear):
    def forward(self, x):
        raise KeyError("lost")


def test_a_crash_is_no_refusal():
    assert judge(case(Crashing(3, 2))).word == "crashed"


def test_of_equal_blocks_in_a_row_two_stay():
    pairs = (nn.Linear(3, 4), nn.Linear(4, 3)) * 2
    blocks = [nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(), nn.ReLU(), nn.ReLU(), *pairs]
    model = nn.ModuleDict({"one": nn.Sequential(*blocks), "many": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
    assert shorten(model) == 3
    assert list(model["one"]) == blocks
    assert list(dict(model["many"].named_children())) == ["0", "1"]


def test_rows_become_a_table_with_reasons():
    rows = [
        {"family": "timm", "model": "one", "evaluation": {"word": "right", "reason": ""}}
        | {"training": {"word": "refused", "reason": "It mixes."}}
    ]
    assert "| timm | training | 0 | 1 |" in table(rows)
    assert "- timm one, training: refused. It mixes." in table(rows)


SAMPLE = {
    "torchvision": ("resnet18", "mobilenet_v3_small"),
    "timm": ("efficientnet",),
    "transformers": ("bert, 4", "gpt2, 4", "t5, 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [(family, name) for family in SAMPLE for name in SAMPLE[family]])
def test_a_sample_of_the_sweep_is_right(family, name, tmp_path):
    if family == "transformers":
        pytest.importorskip("transformers")
    assert any(name in found for found, _ in FAMILIES[family]())
    main(["--json", str(tmp_path / "rows.json"), "--families", family, "--only", name, "--limit", "300"])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row[mode]["word"] for row in rows for mode in ("evaluation", "training")} == {"right"}
