"""Our IVON and ivon-opt 0.1.3, where that is correct: one device, no resume, no scaler."""

from __future__ import annotations

import ivon
import torch
import torch.nn.functional as F
from tiny_training import blobs, mlp

from lightning_bayes.optim.diagonal.ivon import update
from lightning_bayes.optim.diagonal.state import MeanFieldState


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_means_and_curvatures_agree_for_100_steps():
    """The peer draws the noise; our update gets the gradients that it saw, and its learning rate times h₀ + δ."""
    model, (x, y) = mlp().double(), blobs().tensors
    ess, decay, start = 48.0, 0.02, 0.5
    peer = ivon.IVON(
        model.parameters(),
        lr=0.05,
        ess=ess,
        hess_init=start,
        beta1=0.9,
        beta2=0.99,
        weight_decay=decay,
        clip_radius=0.3,
    )
    mean = flat(model)
    state = MeanFieldState(mean, torch.full_like(mean, start), torch.zeros_like(mean))
    for step in range(1, 101):
        with peer.sampled_params(train=True):
            peer.zero_grad()
            F.cross_entropy(model(x.double()), y).backward()
            grad = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).clone()
            noise = flat(model) - state.mean
        peer.step()
        hessian = grad * noise * ess * (state.curvature + decay)
        state = update(
            state,
            grad,
            hessian,
            lr=0.05 * (start + decay),
            betas=(0.9, 0.99),
            prior=decay,
            step=step,
            clip_radius=0.3,
        )
        torch.testing.assert_close(flat(model), state.mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(peer.param_groups[0]["hess"], state.curvature, rtol=1e-9, atol=1e-11)
