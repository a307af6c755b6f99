"""Learning-rate schedules: the user's own sequence, and its shape under an explicit learning rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_training import EXAMPLES, Classifier, LearningRates, fit, loader, mlp, quiet_trainer, two_groups
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from lightning_bayes import LinearSchedule, VOGNCallback, load_posterior
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError

EPOCHS, BATCHES = 2, 6


def per_step(build):
    def configure(module, optimizer_class=AdamW):
        optimizer = optimizer_class(two_groups(module), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": build(optimizer), "interval": "step"}}

    return configure


def warm_up_then_cosine(optimizer):
    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 9)], milestones=[3]
    )


SCHEDULES = {
    "StepLR": lambda o: StepLR(o, 4, gamma=0.5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 12),
    "CyclicLR": lambda o: CyclicLR(o, 0.001, [0.01, 0.02], step_size_up=4, cycle_momentum=False),
    "OneCycleLR": lambda o: OneCycleLR(o, [0.01, 0.02], total_steps=14, cycle_momentum=False),
    "SequentialLR": warm_up_then_cosine,
}


@pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("optimizer_class", [AdamW, SGD], ids=["AdamW", "SGD"])
def test_schedule_gives_the_sequence_of_plain_pytorch(build, optimizer_class):
    """A scheduler that warns about the order of calls would fail this test too: warnings are errors."""
    start, rates = optimizer_class(two_groups(mlp()), lr=1e-2), []
    schedule = build(start)
    for _ in range(EPOCHS * BATCHES):
        rates.append([group["lr"] for group in start.param_groups])
        start.step()
        schedule.step()
    recorder = LearningRates()
    fit(Classifier(lambda m: per_step(build)(m, optimizer_class)), VOGNCallback(), recorder, max_epochs=EPOCHS)
    assert recorder.seen == rates


def test_resumed_run_does_not_take_cycled_momentum_for_a_changed_argument(tmp_path):
    """Warnings are errors here; the sequence continues where it stopped."""
    configure, whole, rest = per_step(lambda o: OneCycleLR(o, 0.01, total_steps=14)), LearningRates(), LearningRates()
    fit(Classifier(configure), VOGNCallback(), whole, max_epochs=2)
    fit(Classifier(configure), VOGNCallback()).save_checkpoint(tmp_path / "half.ckpt")
    quiet_trainer(VOGNCallback(), rest, max_epochs=2).fit(
        Classifier(configure), loader(), ckpt_path=tmp_path / "half.ckpt"
    )
    assert rest.seen == whole.seen[BATCHES:]


@pytest.mark.parametrize("build", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedule_acts_on_an_explicit_learning_rate(build):
    """An explicit lr is the peak of the user's schedule, in every group."""
    own, explicit = LearningRates(), LearningRates()
    fit(Classifier(per_step(build)), own, max_epochs=EPOCHS)
    fit(Classifier(per_step(build)), VOGNCallback(lr=0.3), explicit, max_epochs=EPOCHS)
    peaks = [0.01, 0.02] if build in (SCHEDULES["OneCycleLR"], SCHEDULES["CyclicLR"]) else [3e-3, 5e-3]
    shape = torch.tensor(own.seen, dtype=torch.float64) / torch.tensor(peaks, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(explicit.seen, dtype=torch.float64), 0.3 * shape, rtol=1e-5, atol=1e-6)


def test_a_function_for_the_learning_rate_excludes_a_scheduler():
    module = Classifier(per_step(lambda o: StepLR(o, 4)))
    callback = VOGNCallback(lr=LinearSchedule(0.1, 0.0, 4))
    with pytest.raises(UnsupportedTrainingError, match="is a schedule, and configure_optimizers returns StepLR"):
        fit(module, callback)


def test_a_resumed_run_goes_on_with_a_function_for_the_betas(tmp_path):
    """Also with a schedule that returns a list; warnings are errors here."""

    def betas(step):
        return [0.9 / (1 + step), 0.99]

    fit(Classifier(), VOGNCallback(betas=betas)).save_checkpoint(tmp_path / "half.ckpt")
    resumed = VOGNCallback(betas=betas)
    quiet_trainer(resumed, max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.optimizer.param_groups[0]["posterior"]["betas"] == (0.9 / (1 + 2 * BATCHES), 0.99)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VOGNCallback(kl_weight=LinearSchedule(-1.0, 1.0, 5)), r"kl_weight=-1\.0 must be above 0"),
        (lambda: VOGNCallback(lr=lambda t: None), "lr=None must be at least 0"),
        (lambda: VOGNCallback(prior_precision=lambda t: None), "prior_precision=None must be above 0"),
        (lambda: VOGNCallback(betas=lambda t: 0.9), r"betas=0\.9 must be two numbers"),
        (lambda: VOGNCallback(eval_samples=lambda t: 2), "eval_samples cannot be a function of the step"),
        (
            lambda: VOGNCallback(num_data=lambda t: 2, seed=lambda t: 2),
            "num_data, seed cannot be a function of the step",
        ),
    ],
)
def test_functions_out_of_range_or_place_are_refused_before_the_fit(build, message):
    with pytest.raises(HyperparameterError, match=message):
        build()


@pytest.mark.parametrize("factor", [np.float64(0.9), np.float32(0.9)], ids=["float64", "float32"])
def test_a_users_schedule_that_computes_with_numpy_is_loaded_safely_and_resumed(factor, tmp_path):
    configure, path = per_step(lambda o: LambdaLR(o, lambda step: factor**step)), tmp_path / "numpy.ckpt"
    fit(Classifier(configure), VOGNCallback()).save_checkpoint(path)
    torch.load(path, weights_only=True)
    assert load_posterior(path).num_data == EXAMPLES
    whole, rest = LearningRates(), LearningRates()
    fit(Classifier(configure), VOGNCallback(), whole, max_epochs=2)
    quiet_trainer(VOGNCallback(), rest, max_epochs=2).fit(Classifier(configure), loader(), ckpt_path=path)
    assert rest.seen == whole.seen[BATCHES:]
