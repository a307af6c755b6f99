"""VOGN against what Osawa et al. 2019 ran, by a transcription of their code's steps (algorithms E13)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes.optim import VOGN

F64 = torch.float64


def published_step_and_std(mean, grad, sq_grads, memory, settings):
    """One update in their letters; `memory` holds the momentum and the curvature, with β the weight of the NEW one."""
    l2 = settings["kl"] / (settings["num_data"] * settings["prior_variance"])
    grad = grad + l2 * mean
    memory["momentum"] = settings["momentum"] * memory.get("momentum", 0) + grad  # raw: no (1 - momentum)
    new = sq_grads.mean(0)
    memory["ema"] = settings["ema_decay"] * new + (1 - settings["ema_decay"]) * memory.get("ema", new)
    inverse = 1 / (memory["ema"] + settings["damping"] + l2)
    std = math.sqrt(settings["kl"] / settings["num_data"]) * inverse.sqrt()
    return mean - settings["lr"] * inverse * memory["momentum"], std


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kl", [1.0, 0.1])
def test_steps_at_recorded_samples_are_those_of_the_released_code(momentum, kl, generator):
    """Raw momentum is ours with a learning rate that undoes the bias correction: α (1-β₁ᵗ) / (1-β₁)."""
    settings = {
        "lr": 0.01,
        "momentum": momentum,
        "kl": kl,
        "num_data": 200,
        "prior_variance": 0.5,
        "ema_decay": 0.9,
        "damping": 0.01,
    }
    x = torch.randn(40, 3, generator=generator, dtype=F64)
    y = (x[:, :1] > 0).to(F64)
    model = nn.Linear(3, 1, bias=False).double()
    opt = VOGN(
        model,
        lr=lambda t: settings["lr"] * (1 - momentum ** (t + 1)) / (1 - momentum),
        betas=(momentum, 0.1),
        num_data=200,
        prior_precision=2.0,
        kl_weight=kl,
        damping=0.01,
        damping_in_noise=True,
    )
    mean, std, memory = model.weight.detach().clone()[0], None, {}
    for t in range(30):
        rows = slice(t, t + 10)
        with opt.sampled_params():
            theta = model.weight.detach().clone()[0]
            F.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
        opt.step()
        assert torch.equal(theta, mean) == (std is None)  # their first step has no noise either
        each = (torch.sigmoid(x[rows] @ theta[:, None]) - y[rows]) * x[rows]
        mean, std = published_step_and_std(mean, each.mean(0), each.square(), memory, settings)
        torch.testing.assert_close(model.weight.detach()[0], mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(opt.posterior().std["weight"][0], std, rtol=1e-9, atol=0)
        mean = model.weight.detach().clone()[0]
