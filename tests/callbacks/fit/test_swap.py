"""From the user's optimizer to a noisy one: groups, learning rates, schedules and weight decay carry over."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch.nn.functional as F
from lightning.pytorch import Callback
from tiny_training import (
    CLASSES,
    FEATURES,
    Classifier,
    assert_same_bits,
    blobs,
    fit,
    groups_after,
    mlp,
    two_groups,
    weights,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lightning_bayes import OGNCallback, VadamCallback, VOGNCallback
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.groups import flat


def test_parameter_groups_keep_members_rates_decay_and_the_users_own_keys():
    module = Classifier(lambda m: AdamW(two_groups(m), weight_decay=0.02))
    callback = VOGNCallback()
    fit(module, callback)
    found = [
        (group["name"], group["lr"], group["weight_decay"], [p.shape for p in group["params"]])
        for group in callback.optimizer.param_groups
    ]
    layers = (module.net[0], module.net[2])
    assert found == [
        ("weights", 3e-3, 0.02, [layer.weight.shape for layer in layers]),
        ("biases", 5e-3, 0.0, [layer.bias.shape for layer in layers]),
    ]
    assert {id(p) for g in callback.optimizer.param_groups for p in g["params"]} == {id(p) for p in module.parameters()}


def test_default_is_the_users_step():
    (adam,) = groups_after(lambda m: AdamW(m.parameters(), lr=2e-3), VOGNCallback())
    wanted = {"step_rule": "user", "relative_noise": 0.07, "lr": 2e-3}
    assert {key: flat(adam)[key] for key in wanted} == wanted


@pytest.mark.parametrize("callback", [VOGNCallback, VadamCallback])
@pytest.mark.parametrize(("arguments", "noise"), [({}, 0.07), ({"relative_noise": 0.3}, 0.3)])
def test_default_noise_does_not_depend_on_the_optimizer(callback, arguments, noise):
    (group,) = groups_after(lambda m: SGD(m.parameters(), lr=2e-3), callback(**arguments))
    assert group["posterior"]["relative_noise"] == noise


def deep_classifier(configure=lambda module: AdamW(module.parameters(), lr=2e-3)):
    layers = [nn.Linear(FEATURES, 4), *(nn.Linear(4, 4) for _ in range(18)), nn.Linear(4, CLASSES)]
    return Classifier(configure, nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [({}, 20), ({"bayesian": r"^net\.1[0-8]\."}, 9), ({"bayesian": r"^net\.19\."}, 5), ({"relative_noise": 0.07}, 5)],
    ids=["all", "nine of them", "the last", "a choice"],
)
def test_default_noise_of_many_layers_adds_up_to_that_of_five(arguments, layers):
    callback = VOGNCallback(**arguments)
    fit(deep_classifier(), callback)
    assert callback.optimizer.param_groups[0]["posterior"]["relative_noise"] * layers**0.5 == pytest.approx(
        0.07 * 5**0.5
    )


def test_default_noise_knows_of_layers_that_were_thawed():
    class Thawing(Callback):
        bounds: ClassVar[list[float]] = []

        def on_train_start(self, trainer, module):
            module.net[:15].requires_grad_(False)  # five are left

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.bounds.append(trainer.optimizers[0].param_groups[0]["posterior"]["relative_noise"])
            if batch_idx == 1:
                module.net.requires_grad_(True)

    fit(deep_classifier(), VOGNCallback(), Thawing(), max_epochs=1)
    assert Thawing.bounds[1] == 0.07
    assert Thawing.bounds[2] * 20**0.5 == pytest.approx(0.07 * 5**0.5)


@pytest.mark.parametrize("batches", [1, 2])
def test_the_first_update_has_one_bound_of_the_noise(batches):
    """A measurement under noise is divided by the noise's variance, so the two must agree in every batch of an update."""
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["posterior"]["relative_noise"])

        def on_after_backward(self, trainer, module):
            seen.append(trainer.optimizers[0].param_groups[0]["posterior"]["relative_noise"])

    fit(Classifier(), VOGNCallback(init_precision=50.0), Watch(), max_epochs=1, accumulate_grad_batches=batches)
    assert seen[: 2 * batches + 2] == [0.01] * 2 * batches + [0.07, 0.07]


def test_default_without_noise_is_a_trust_region_of_the_users_kind():
    (adam,) = groups_after(lambda m: AdamW(m.parameters(), lr=2e-3), OGNCallback())
    (sgd,) = groups_after(lambda m: SGD(m.parameters(), lr=2e-3, momentum=0.7), OGNCallback())
    wanted = {"step_rule": "trust_region", "lr": 2e-3}
    adam, sgd = flat(adam), flat(sgd)
    assert {key: adam[key] for key in wanted} == {key: sgd[key] for key in wanted} == wanted
    assert (adam["radius"], sgd["radius"], sgd["momentum"]) == ("adam", "sgd", 0.7)


def test_explicit_learning_rate_gives_the_papers_step_and_noise():
    (group,) = groups_after(lambda m: AdamW(m.parameters(), lr=2e-3), VOGNCallback(lr=0.05))
    assert (group["lr"], group["posterior"]["step_rule"], group["posterior"]["relative_noise"]) == (
        0.05,
        "natural",
        None,
    )


def test_parameters_left_out_of_the_optimizer_do_not_move():
    module = Classifier(lambda m: AdamW(m.net[2].parameters(), lr=1e-2))
    before = weights(module.net[0])
    callback = VOGNCallback()
    fit(module, callback)
    assert_same_bits(weights(module.net[0]), before)
    assert sorted(callback.optimizer.posterior().mean) == ["net.2.bias", "net.2.weight"]


def test_groups_added_later_take_the_callbacks_and_the_users_settings():
    callback = VOGNCallback(kl_weight=0.5)
    fit(Classifier(lambda m: Adam(m.net[0].parameters(), lr=1e-3, weight_decay=0.02)), callback)
    late = mlp()
    callback.optimizer.add_param_group({"params": list(late[2].parameters())})
    first, added = map(flat, callback.optimizer.param_groups)
    for key in ("lr", "weight_decay", "num_data", "kl_weight", "decay", "step_rule", "radius", "relative_noise"):
        assert added[key] == first[key], key


def test_group_values_out_of_range_are_refused():
    with pytest.raises(HyperparameterError, match=r"lr=nan must be at least 0"):
        groups_after(lambda m: AdamW([{"params": m.parameters(), "lr": float("nan")}]), VOGNCallback())


def test_default_learns_as_well_as_the_users_optimizer():
    """Training loss at the posterior mean against AdamW's, after the same twenty epochs."""
    losses, (x, y) = [], blobs().tensors
    for callbacks in ([], [VOGNCallback()]):
        module = Classifier()
        fit(module, *callbacks, max_epochs=20)
        losses.append(F.cross_entropy(module(x), y).item())
    assert losses[1] < 1.2 * losses[0]


def test_after_a_fit_a_closure_runs_at_weight_samples_again():
    callback, module = VOGNCallback(mc_samples=2), Classifier()
    fit(module, callback)
    inputs, labels = blobs().tensors
    seen = []

    def closure():
        callback.optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), labels)
        loss.backward()
        seen.append(loss)
        return loss

    callback.optimizer.step(closure)
    assert len(seen) == 2
    assert seen[0] != seen[1]
