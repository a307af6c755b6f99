"""Layers with attention through the engines: masks per head, dropout, frozen projections, weights in the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from oracles import assert_measures, one_example_at_a_time, relative_error
from random_matrices import normal
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.rules import rule_for
from lightning_bayes.curvature.workspace import Workspace

ENGINES = pytest.mark.parametrize("engine", ["fused", "backpack"])


class Attends(nn.Module):
    """Self-attention between linear layers; the loss also takes the attention weights."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x, **call):
        hidden = self.first(x)
        out, weights = self.attention(hidden, hidden, hidden, **call)
        extra = 0 if weights is None else weights.square().sum((-1, -2)).unsqueeze(-1)
        return self.last(out).square().sum(1) + extra


def assert_measured(model, x, engine, **call):
    """Every example alone has the gradient that `measure` squares."""
    measured = measure(model, lambda: model(x, **call).mean(0).sum(), engine=engine)
    assert_measures(measured, model, list(x), lambda m, e: m(e[None], **call).mean(0).sum(), 1e-10)


@ENGINES
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_attention_equals_the_loop(options, need_weights, engine, generator):
    model = Attends(**options).double()
    assert rule_for(model.attention) is not None
    assert_measured(model, normal(5, 6, 4, generator=generator), engine, need_weights=need_weights)


@ENGINES
@pytest.mark.parametrize(
    "frozen", [["in_proj_weight"], ["out_proj.weight", "out_proj.bias"], ["in_proj_weight", "in_proj_bias"]]
)
def test_frozen_projections_are_left_out(frozen, engine, generator):
    model = Attends().double()
    for name in frozen:
        model.attention.get_parameter(name).requires_grad = False
    assert_measured(model, normal(5, 6, 4, generator=generator), engine, need_weights=False)


@ENGINES
def test_eval_mode_without_inputs_gradient_equals_the_loop(engine, generator):
    """torch's fast path runs where nothing requires gradients, as inside a capture."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x, **call):
            return self.last(self.attention(x, x, x, **call)[0]).square().sum(1)

    assert_measured(First().double().eval(), normal(5, 6, 4, generator=generator), engine, need_weights=False)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_mask_of_each_head_is_taken(dim, generator):
    """Its rows are heads of examples, [B · heads, T, S]."""
    layer = nn.MultiheadAttention(4, 2, batch_first=dim == 0).double()
    x, mask = normal(5, 6, 4, generator=generator), normal(10, 6, 6, generator=generator)
    delta = normal(5, 6, 4, generator=generator)
    rule, turned = rule_for(layer), x.transpose(0, dim)
    inputs = rule.prepared(layer, (turned,) * 3, {"attn_mask": mask, "need_weights": False})
    each = rule(layer, inputs, delta.transpose(0, dim))
    totals = rule.sums(layer, inputs, delta.transpose(0, dim), Workspace())
    named = dict(layer.named_parameters())
    for i in range(5):
        one = x[i : i + 1].transpose(0, dim)
        out, _ = layer(one, one, one, attn_mask=mask[2 * i : 2 * i + 2], need_weights=False)
        truth = torch.autograd.grad(out, list(named.values()), delta[i : i + 1].transpose(0, dim))
        for name, value in zip(named, truth, strict=True):
            torch.testing.assert_close(each[name][i], value, rtol=1e-10, atol=1e-12)
    for name, (grad, square) in totals.items():
        torch.testing.assert_close(grad, each[name].sum(0))
        torch.testing.assert_close(square, each[name].square().sum(0))


@ENGINES
@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_that_of_the_forward(need_weights, engine, generator):
    """With the forward's noise the mean gradient is autograd's own."""
    model, x = Attends(dropout=0.5).double(), normal(5, 6, 4, generator=generator)
    torch.manual_seed(3)
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(model(x, need_weights=need_weights).mean(0).sum(), list(params.values()))
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    measured = measure(model, lambda: model(x, need_weights=need_weights).mean(0).sum(), engine=engine)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert relative_error(measured.grad, dict(zip(params, grads, strict=True))) < 1e-10
    # By Jensen's inequality, up to rounding: the bias of the keys has the gradient 0.
    assert all((measured.curvature[k] >= measured.grad[k].square() * (1 - 1e-9) - 1e-30).all() for k in params)


@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_half_precision_is_measured_in_full(half, generator):
    model, x = Attends(), torch.randn(5, 6, 4, generator=generator)
    if half == "weights":
        model, x = model.bfloat16(), x.bfloat16()
    truth = copy.deepcopy(model).float()
    _, square = one_example_at_a_time(truth, list(x.float()), lambda m, e: m(e[None]).mean(0).sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        measured = measure(model, lambda: model(x).float().mean(0).sum())
    assert relative_error(measured.curvature, square) < 0.1
