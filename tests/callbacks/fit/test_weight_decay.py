"""Weight decay: decoupled decay stays, an L2 penalty becomes the prior precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time
from tiny_training import EXAMPLES, Classifier, blobs, fit, groups_after, loader, mlp, two_groups
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import NoisyKFACCallback, OGNCallback, VOGNCallback
from lightning_bayes.optim.effective import effective


def first_update(module, *, lr, prior, shrinkage):
    """μ₁ of VOGN with β₁ = 0 and no noise, by hand: decay first, then the natural step from the decayed mean."""
    examples = list(zip(*loader(EXAMPLES).dataset.tensors, strict=True))
    grad, square = one_example_at_a_time(module, examples, lambda m, e: F.cross_entropy(m(e[0][None]), e[1][None]))
    updated = {}
    for name, start in module.named_parameters():
        mean = (1 - shrinkage) * start.detach()
        updated[name] = mean - lr * (grad[name] + prior * mean) / (square[name] + prior)
    return updated


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_adamw_weight_decay_stays_decoupled(decay):
    """μ ← (1 - α wd) μ with the user's α beside an explicit one, and the prior stays N(0, 1)."""
    module = Classifier(lambda m: AdamW(m.parameters(), lr=0.02, weight_decay=decay))
    expected = first_update(copy.deepcopy(module), lr=0.1, prior=1 / EXAMPLES, shrinkage=0.02 * decay)
    callback = OGNCallback(lr=0.1, betas=(0.0, 0.9))
    fit(module, callback, data=loader(EXAMPLES))
    assert callback.optimizer.param_groups[0]["posterior"]["prior_precision"] == 1.0
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.detach(), expected[name], rtol=1e-4, atol=1e-6)


ADAPTIVE = ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "Adafactor", "Muon"]
CHOICES = [(name, {}) for name in ADAPTIVE] + [(name, {"decoupled_weight_decay": True}) for name in ("NAdam", "RAdam")]


@pytest.mark.parametrize(("name", "options"), CHOICES, ids=str)
def test_decay_is_decoupled_where_pytorch_decouples_it(name, options):
    """Without a gradient, a decoupled decay multiplies the weights by 1 - lr·wd; a penalty is also scaled."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    options = {"lr": 0.01, "weight_decay": 0.5, **options}
    weight = nn.Parameter(torch.ones(3, 2))
    plain = getattr(torch.optim, name)([weight], **options)
    weight.grad = torch.zeros_like(weight)
    for _ in range(10):  # RAdam's first steps are not adaptive yet
        plain.step()
    decoupled = torch.allclose(weight, torch.tensor((1 - 0.01 * 0.5) ** 10))
    assert decoupled == (name in {"AdamW", "Adafactor", "Muon"} or "decoupled_weight_decay" in options)

    matrices = Classifier(lambda m: getattr(torch.optim, name)([p for p in m.parameters() if p.ndim == 2], **options))
    callback = VOGNCallback(num_data=10)
    fit(matrices, callback)
    (group,) = callback.optimizer.param_groups
    assert group["weight_decay"] == 0.5
    assert effective(group).prior_precision == (0.1 if decoupled else pytest.approx(0.5 * 10))


@pytest.mark.parametrize("optimizer_class", [Adam, SGD])
@pytest.mark.parametrize(("kl_weight", "augmentation"), [(1.0, 1.0), (0.5, 2.0)])
def test_l2_penalty_becomes_the_prior_precision(optimizer_class, kl_weight, augmentation):
    """δ = Ñ wd / τ, so that δ̃ = τδ/Ñ is the penalty itself."""
    callback = VOGNCallback(kl_weight=kl_weight, data_augmentation_factor=augmentation)
    (group,) = groups_after(lambda m: optimizer_class(m.parameters(), lr=1e-3, weight_decay=0.01), callback)
    assert effective(group).prior_precision == pytest.approx(0.01 * EXAMPLES * augmentation / kl_weight)
    assert effective(group).prior == group["weight_decay"] == 0.01


def test_group_without_penalty_keeps_the_default_prior():
    penalised, free = groups_after(lambda m: Adam(two_groups(m), weight_decay=0.05), VOGNCallback())
    assert effective(penalised).prior_precision == pytest.approx(0.05 * EXAMPLES)
    assert effective(free).prior_precision == 0.1


@pytest.mark.parametrize("make", [VOGNCallback, NoisyKFACCallback])
def test_without_a_prior_of_their_own_users_train_without_one(make):
    """Adam would move weights without data to a prior's mean at full speed, however weak the prior is."""

    x, y = blobs().tensors
    data = DataLoader(TensorDataset(x * torch.tensor([0.0, 1.0, 1.0, 1.0]), y), batch_size=8)

    def weights_of_the_dead_input(**prior):
        module = Classifier(lambda m: Adam(m.parameters(), lr=1e-2))
        fit(module, make(**prior), data=data)
        return module.net[0].weight.detach()[:, 0]

    start = mlp()[0].weight[:, 0]
    assert torch.equal(weights_of_the_dead_input(), start)
    moved = weights_of_the_dead_input(prior_precision=0.1)
    far = start.abs() > 0.06  # than six full steps
    assert far.any()
    torch.testing.assert_close((start.abs() - moved.abs())[far], torch.full_like(start[far], 0.06), rtol=0.05, atol=0)


def test_only_penalised_groups_pull_their_means():
    penalised, free = groups_after(lambda m: Adam(two_groups(m), weight_decay=0.05), VOGNCallback())
    assert (effective(penalised).stated_prior, effective(free).stated_prior) == (0.05, 0.0)
    (initial,) = groups_after(lambda m: Adam(m.parameters()), VOGNCallback(prior_mean="initial"))
    assert effective(initial).stated_prior > 0


def test_strong_prior_from_a_penalty_is_pointed_out():
    message = (
        r"weight_decay=0\.5 with 48 examples implies a prior precision of 24, which is strong\. "
        r"Pass prior_precision=1\.0"
    )
    with pytest.warns(UserWarning, match=message):
        groups_after(lambda m: SGD(m.parameters(), lr=1e-3, weight_decay=0.5), VOGNCallback())


def test_explicit_prior_precision_wins_over_a_penalty():
    (group,) = groups_after(lambda m: SGD(m.parameters(), lr=1e-3, weight_decay=0.5), VOGNCallback(prior_precision=3.0))
    assert effective(group).prior_precision == 3.0
