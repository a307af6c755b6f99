"""torchvision's ConvNeXt, with and without stochastic depth; the truth is autograd on the loss of each example."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles import mean_squares
from tiny_training import assert_close
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from lightning_bayes.curvature import measure


def network(depth):
    stages = [CNBlockConfig(8, 12, 2), CNBlockConfig(12, None, 1)]
    return ConvNeXt(stages, stochastic_depth_prob=depth, layer_scale=0.5, num_classes=3).double()


@pytest.mark.parametrize("depth", [0.0, 0.6])
@pytest.mark.parametrize("training", [True, False])
def test_squares_are_those_of_a_loop_over_examples(depth, training, generator):
    torch.manual_seed(0)
    model = network(depth).train(training)
    x, y = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    torch.manual_seed(1)
    measured = measure(model, lambda: F.cross_entropy(model(x), y))
    torch.manual_seed(1)  # the same noise
    losses = F.cross_entropy(model(x), y, reduction="none")
    assert_close(measured.curvature, mean_squares(model, losses), rtol=1e-8, atol=1e-12)
