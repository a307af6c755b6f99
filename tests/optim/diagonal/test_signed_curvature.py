"""The precision stays positive with negative curvature while a schedule lowers the prior."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_family import train_on
from torch import nn

from lightning_bayes.optim import BBB, IVON, VON, LinearSchedule, ReparameterisedVON


@pytest.mark.parametrize("optimizer", [BBB, IVON, ReparameterisedVON])
@pytest.mark.parametrize("name", ["kl_weight", "prior_precision"])
def test_training_goes_on_while_the_prior_falls(optimizer, name, generator):
    """From δ̃ = 0.01 to 0.001, with s = -0.009 at the start."""
    x = torch.randn(8, 3, generator=generator)
    model = nn.Linear(3, 1)
    opt = optimizer(model, lr=1e-3, num_data=100, init_precision=1.0, **{name: LinearSchedule(1.0, 0.1, steps=3)})
    for param in model.parameters():
        opt.state[param]["curvature"].fill_(-0.009)
        opt.state[param]["step"] = 1
    opt.refresh_noise()
    for _ in range(5):
        train_on(opt, lambda: F.mse_loss(model(x), x[:, :1]))
        for precision in opt.posterior().precision.values():
            assert (precision > 0).all()
    assert opt.skipped_steps == 0
    assert nn.utils.parameters_to_vector(model.parameters()).isfinite().all()


@pytest.mark.parametrize("optimizer", [BBB, IVON, VON, ReparameterisedVON])
@pytest.mark.parametrize("name", ["kl_weight", "prior_precision"])
def test_a_prior_lowered_by_hand_leaves_a_thousandth_of_its_precision(optimizer, name):
    """From δ̃ = 0.01 to 0.001, with s = -0.009: the precision Ñ (s + δ̃) of the noise must not become -0.8."""
    model = nn.Linear(3, 1)
    opt = optimizer(model, lr=1e-3, num_data=100, init_precision=1.0)
    opt.posterior()
    for param in model.parameters():
        opt.state[param]["curvature"].fill_(-0.009)
        opt.state[param]["step"] = 1
    opt.param_groups[0]["posterior"][name] = 0.1
    opt.refresh_noise()
    expected = torch.tensor(1e-3 if name == "kl_weight" else 1e-4)
    for precision in opt.posterior().precision.values():
        torch.testing.assert_close(precision, expected.expand_as(precision), rtol=1e-3, atol=0.0)
