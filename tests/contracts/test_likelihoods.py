"""The contract of every kind of likelihood, on the cases listed in its file; the truth is many targets drawn from it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightning_bayes.likelihood import KINDS, Family, OutputLikelihood

COUNT = 40_000
CASES = [case for kind in KINDS.values() for case in kind.cases]
every_case = pytest.mark.parametrize(
    ("build", "shape"), CASES, ids=[f"{build()!r}-{'x'.join(map(str, shape))}" for build, shape in CASES]
)


@pytest.fixture
def drawn(generator):
    """A kind's output ``[1, …]``, copies of it ``[COUNT, …]``, and a target for each copy."""

    def of(kind, shape):
        outputs = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        copies = outputs.repeat(COUNT, *(1 for _ in shape))
        return outputs, copies, kind.sample(copies, generator)

    return of


def standardised(values, expected=0.0):
    """The largest distance of a mean over targets from its expectation, in standard errors."""
    error = values.std(0) / math.sqrt(len(values))
    return float(((values.mean(0) - expected).abs() / (error + 1e-9)).max())


def test_every_kind_that_draws_targets_has_a_case():
    drawing = {kind for kind in KINDS.values() if kind.sample is not OutputLikelihood.sample}
    assert {kind for kind in drawing if not kind.cases} <= {Family}  # its function states everything


@every_case
def test_density_and_curvature_are_those_of_the_draws(build, shape, drawn):
    """E ∇ log p = 0 and E ∇ log p ∇ log pᵀ = H = Σ v vᵀ."""
    kind = build()
    outputs, copies, targets = drawn(kind, shape)
    copies.requires_grad_()
    (score,) = torch.autograd.grad(kind.log_prob(copies, targets).sum(), copies)
    score = score.flatten(1)
    assert standardised(score) < 5
    columns = torch.stack([kind.root(outputs, index).flatten() for index in range(math.prod(shape))])
    assert standardised(torch.einsum("np,nq->npq", score, score), columns.mT @ columns) < 5


@every_case
def test_a_summary_of_one_sample_has_the_moments_and_the_interval_of_the_draws(build, shape, drawn):
    kind = build()
    outputs, _, targets = drawn(kind, shape)
    found, targets = kind.summarise(outputs[None], 0.8), targets.double()
    if kind.has_classes:
        probs, classes = kind.class_probs(outputs[None])[0], range(kind.class_probs(outputs[None]).shape[-1])
        for number in classes:
            assert standardised((targets == number).double(), probs[..., number]) < 5
        return
    assert standardised(targets, found.mean.reshape(targets[:1].shape)) < 5
    assert standardised((targets - targets.mean(0)).square(), found.aleatoric.reshape(targets[:1].shape)) < 5
    inside = (found.lower.reshape(targets[:1].shape) <= targets) & (targets <= found.upper.reshape(targets[:1].shape))
    assert bool((inside.double().mean(0) > 0.8 - 5 * math.sqrt(0.16 / COUNT)).all())


@every_case
def test_the_average_over_equal_samples_is_the_sample(build, shape, generator):
    kind = build()
    outputs = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    combined = kind.combine(outputs.expand(3, *outputs.shape))
    if kind.has_classes:  # logits up to a constant
        torch.testing.assert_close(kind.class_probs(combined[None]), kind.class_probs(outputs[None]))
    else:
        torch.testing.assert_close(combined, outputs)


@every_case
def test_a_file_restores_the_kind(build, shape):
    state = build().state()
    assert json.loads(json.dumps(state)) == state
    assert OutputLikelihood.of_state(state).state() == state
    assert repr(OutputLikelihood.of_state(state)) == repr(build())
