"""`MultiModeCallback` against networks copied by hand, and its rates against torch's cosine schedule."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from tiny_training import (
    Classifier,
    LearningRates,
    NormedClassifier,
    adamw,
    assert_same_bits,
    blobs,
    fit,
    loader,
    quiet_trainer,
    two_groups,
    weights,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import MultiModeCallback, SWAGCallback, VOGNCallback
from lightning_bayes.callbacks.ensembles.cycles import cycle_ends, rate_at
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.predictive import PosteriorSamples

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")
ENDS = (19, 29, 38, 48)  # of the 48 updates of eight epochs


def four_modes(peak=3.0):
    return MultiModeCallback(4, peak, 0.4, calibrate=False)


class Copies(Callback):
    """Copies the network after every update."""

    def __init__(self):
        self.found = {}

    def on_train_batch_end(self, trainer, module, *_):
        self.found.setdefault(trainer.global_step, weights(module))


def one_cycle(module):
    optimizer = adamw(module)
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, 2e-2, total_steps=48), "interval": "step"}]


def cosine(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    return [optimizer], [CosineAnnealingLR(optimizer, 8)]


def normed(configure=adamw, seed=0):
    torch.manual_seed(seed)
    module = NormedClassifier()
    module.configure = configure
    return module


def scored(module, *callbacks, **kwargs):
    module.seen = []
    quiet_trainer(*callbacks).test(module, loader(), verbose=False, **kwargs)
    return torch.cat(module.seen).softmax(1)


def averaged(module, copies):
    probs = []
    for copy in copies:
        module.load_state_dict(copy)
        with torch.no_grad():
            probs.append(module.eval()(blobs().tensors[0]).softmax(1))
    return torch.stack(probs).mean(0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("modes") / "last.ckpt"
    copies, callback, module = Copies(), four_modes(), normed(one_cycle)
    fit(module, copies, callback, max_epochs=8).save_checkpoint(path)
    return module, callback, copies.found, path


def test_the_modes_are_the_networks_at_the_ends_of_the_cycles(run):
    _, callback, found, _ = run
    assert len(callback.modes) == 4
    for mode, end in zip(callback.modes, ENDS, strict=True):
        assert_same_bits(mode, found[end])
    assert not torch.equal(callback.modes[0]["net.1.running_mean"], callback.modes[1]["net.1.running_mean"])


def test_a_test_averages_over_the_modes(run):
    module, callback, found, _ = run
    before = weights(module)
    expected = averaged(normed(), [found[end] for end in ENDS])
    torch.testing.assert_close(scored(module, callback), expected)
    assert_same_bits(weights(module), before)
    with torch.no_grad():
        assert (module.eval()(blobs().tensors[0]).softmax(1) - expected).abs().max() > 1e-3


def test_a_checkpoint_alone_is_enough(run):
    _, _, found, path = run
    other = MultiModeCallback(num_modes=2, peak=1.0)
    expected = averaged(normed(), [found[end] for end in ENDS])
    torch.testing.assert_close(scored(normed(seed=3), other, ckpt_path=path), expected)
    assert other.likelihood_of(normed()).classifies


def test_predictions_have_the_mutual_information_of_the_modes(run):
    module, callback, found, _ = run
    batches = quiet_trainer(callback).predict(module, loader())
    expected = averaged(normed(), [found[end] for end in ENDS])
    torch.testing.assert_close(torch.cat([batch["probs"] for batch in batches]), expected)
    assert torch.cat([batch["mutual_information"] for batch in batches]).max() > 1e-3


@pytest.mark.parametrize("configure", [one_cycle, cosine], ids=["OneCycleLR", "CosineAnnealingLR"])
def test_a_run_resumes_bit_for_bit_within_a_cycle(tmp_path, configure):
    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 3:  # update 24, in the second cycle
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, again = four_modes(), four_modes()
    module, resumed = normed(configure), normed(configure, seed=1)
    fit(module, whole, Save(), max_epochs=8)
    quiet_trainer(again, max_epochs=8).fit(resumed, loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert_same_bits(weights(resumed), weights(module))
    for one, other in zip(again.modes, whole.modes, strict=True):
        assert_same_bits(one, other)


def test_each_cycle_is_a_half_cosine_from_the_peak():
    ends = cycle_ends(1000, 4, 0.4)
    assert ends == (400, 600, 800, 1000)
    rates = [rate_at(update, ends) for update in range(1000)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = CosineAnnealingLR(optimizer, 280)  # the first cycle after a warm-up of three tenths
    cosine = []
    for _ in range(280):
        optimizer.step()
        schedule.step()
        cosine.append(optimizer.param_groups[0]["lr"])
    between = [(a + b) / 2 for a, b in itertools.pairwise(rates[120:400])]
    torch.testing.assert_close(torch.tensor(between), torch.tensor(cosine[:-1]), atol=1e-4, rtol=0)
    assert all(a < b for a, b in itertools.pairwise(rates[:120]))
    for start, end in itertools.pairwise((0, *ends)):
        assert max(rates[start:end]) > 0.999
        assert rates[end - 1] < 1e-3
    assert rate_at(1000, ends) == 0


@pytest.mark.parametrize("configure", [one_cycle, cosine], ids=["OneCycleLR", "CosineAnnealingLR"])
def test_the_peak_is_a_multiple_of_the_largest_rate_of_any_schedule(configure):
    seen = LearningRates()
    fit(normed(configure), four_modes(peak=2.0), seen, max_epochs=8)
    expected = [4e-2 * rate_at(update, ENDS) for update in range(48)]
    torch.testing.assert_close(torch.tensor(seen.seen).flatten(), torch.tensor(expected))


def test_groups_keep_the_ratio_of_their_rates():
    seen = LearningRates()
    module = Classifier(lambda m: torch.optim.AdamW(two_groups(m)))
    fit(module, four_modes(), seen, max_epochs=8)
    weight, bias = torch.tensor(seen.seen).T
    torch.testing.assert_close(bias, weight * 5 / 3)
    assert weight.max() > 0.95 * 9e-3


def test_the_momentum_of_one_cycle_is_low_where_the_rate_is_high():
    betas = []

    class Betas(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            betas.append(optimizer.param_groups[0]["betas"][0])

    fit(normed(one_cycle), four_modes(), Betas(), max_epochs=8)
    expected = [0.95 - 0.1 * rate_at(update, ENDS) for update in range(48)]
    torch.testing.assert_close(torch.tensor(betas), torch.tensor(expected))


def test_accumulated_batches_are_one_update():
    copies, callback = Copies(), MultiModeCallback(num_modes=2, first=0.5)
    fit(normed(), copies, callback, max_epochs=8, accumulate_grad_batches=2)
    assert max(copies.found) == 24
    assert_same_bits(callback.modes[0], copies.found[12])
    assert_same_bits(callback.modes[1], copies.found[24])


def test_validation_is_at_the_current_weights_until_the_last_mode_is_found():
    class Losses(Callback):
        def __init__(self):
            self.found = []

        def on_validation_end(self, trainer, module):
            self.found.append(float(trainer.callback_metrics["val_loss"]))

    callback, losses, module = four_modes(), Losses(), normed()
    quiet_trainer(callback, losses, max_epochs=8, num_sanity_val_steps=0).fit(module, loader(), loader())
    y = blobs().tensors[1]
    log_probs = averaged(normed(), callback.modes).log()
    assert losses.found[-1] == pytest.approx(float(torch.nn.functional.nll_loss(log_probs, y)), rel=1e-4)
    assert len(losses.found) == 8


@pytest.mark.parametrize("noisy", [False, True], ids=["last mode", "several modes"])
def test_validation_data_choose_how_many_of_the_last_modes_are_averaged(tmp_path, noisy, caplog, generator):
    x, y = blobs().tensors
    y = torch.randint(3, y.shape, generator=generator) if noisy else y
    callback, module = four_modes(peak=0.05), normed()
    with caplog.at_level(logging.INFO):
        trainer = quiet_trainer(callback, max_epochs=8)
        trainer.fit(module, loader(), DataLoader(TensorDataset(x, y), 8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    log_probs = [averaged(normed(), callback.modes[-count:]).log() for count in (1, 2, 3, 4)]
    nlls = [float(torch.nn.functional.nll_loss(each, y)) for each in log_probs]
    assert callback.count == 1 + nlls.index(min(nlls))
    assert f"averages over the last {callback.count} of 4 modes" in caplog.text
    assert ("The earlier ones underfit: train longer" in caplog.text) is not noisy
    expected = log_probs[callback.count - 1].exp()
    torch.testing.assert_close(scored(module, callback), expected)
    torch.testing.assert_close(scored(normed(), four_modes(), ckpt_path=tmp_path / "last.ckpt"), expected)
    assert (callback.count == 1) is not noisy


def test_unchanged_tensors_are_stored_once():
    module = normed()
    module.net[0].requires_grad_(False)
    callback = four_modes()
    fit(module, callback, max_epochs=8)
    first, second = callback.modes[:2]
    assert first["net.0.weight"] is second["net.0.weight"]
    assert not torch.equal(first["net.3.weight"], second["net.3.weight"])


def test_a_second_fit_starts_again(run):
    callback = MultiModeCallback(num_modes=2)
    fit(normed(), callback, max_epochs=2)
    fit(normed(), callback, max_epochs=2)
    assert len(callback.modes) == 2


def test_lines_at_the_start_and_at_the_end_say_what_it_does(caplog):
    with caplog.at_level(logging.INFO):
        fit(normed(), four_modes(), max_epochs=8)
    assert "4 cycles end at updates 19, 29, 38, 48, each after a peak of 3 times" in caplog.text
    assert "found 4 of 4 modes; their weights differ by " in caplog.text


def test_an_early_end_keeps_the_modes_found():
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = trainer.current_epoch == 4

    callback, module = four_modes(), normed()
    with pytest.warns(UserWarning, match="found 2 of 4 modes.*after update 30 of 48, within a cycle"):
        fit(module, callback, Stop(), max_epochs=8)
    torch.testing.assert_close(scored(module, callback), averaged(normed(), callback.modes))


def test_a_longer_resumed_run_says_that_its_cycles_are_others(run):
    again = four_modes()
    with pytest.warns(UserWarning, match="end at updates 19, 29, 38, 48, those of this run at 24, 36, 48, 60"):
        quiet_trainer(again, max_epochs=10).fit(normed(), loader(), ckpt_path=run[3])
    assert len(again.modes) == 5


def test_without_a_mode_the_current_weights_are_evaluated():
    module = normed()
    with pytest.warns(UserWarning, match="no mode was found or loaded"):
        found = scored(module, four_modes())
    with torch.no_grad():
        torch.testing.assert_close(found, module.eval()(blobs().tensors[0]).softmax(1))


def test_modes_of_another_network_are_refused(run):
    module = Classifier()
    module.strict_loading = False
    with pytest.raises(
        PosteriorError, match=r"not networks of this Classifier .*unknown to the model: .*net\.1\.running_mean"
    ):
        quiet_trainer(four_modes()).predict(module, loader(), ckpt_path=run[3])


@pytest.mark.parametrize("arguments", [{"num_modes": 1}, {"num_modes": 2.5}, {"peak": 0.0}, {"first": 1.0}])
def test_arguments_out_of_range_are_refused(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(HyperparameterError, match=f"{name}={value}"):
        MultiModeCallback(**arguments)


@pytest.mark.parametrize("ends", [{"max_epochs": -1}, {"max_epochs": -1, "max_steps": -1}])
def test_a_fit_without_an_end_is_refused(ends):
    with pytest.raises(HyperparameterError, match=r"it has no end: max_epochs=-1.*Pass max_steps"):
        fit(normed(), four_modes(), **ends)


def test_too_few_updates_are_refused():
    with pytest.raises(HyperparameterError, match=r"num_modes=4 and first=0\.4 leave 1 of 6 updates to a cycle"):
        fit(normed(), four_modes(), max_epochs=1)


def test_manual_optimization_is_refused():
    module = normed()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedTrainingError, match=r"manual optimization.*MemberSamples"):
        fit(module, four_modes())


def test_an_optimizer_without_a_rate_is_refused():
    def without(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    with pytest.raises(UnsupportedTrainingError, match="SGD has lr=None"):
        fit(normed(without), four_modes(), max_epochs=8)


def test_a_posterior_that_is_not_sampled_is_refused():
    with pytest.raises(HyperparameterError, match=r"VOGNCallback\(eval_samples=0\) evaluates the last mode alone"):
        fit(normed(), VOGNCallback(eval_samples=0), four_modes(), max_epochs=8)


def test_a_second_posterior_is_refused():
    with pytest.raises(UnsupportedTrainingError, match="each average predictions"):
        fit(normed(), four_modes(), SWAGCallback(), max_epochs=8)


def test_a_trial_run_evaluates_what_it_found():
    module, callback = normed(), four_modes()
    trainer = quiet_trainer(callback, EarlyStopping("val_loss"), fast_dev_run=True)
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    assert callback.modes


def test_beside_a_variational_callback_each_mode_is_a_posterior(tmp_path):
    vogn, modes, module = VOGNCallback(eval_samples=6, relative_noise=0.3), four_modes(), normed()
    fit(module, vogn, modes, max_epochs=8).save_checkpoint(tmp_path / "last.ckpt")
    assert len(modes.posteriors) == 4
    for posterior, mode in zip(modes.posteriors, modes.modes, strict=True):
        assert_same_bits(posterior.mean, {name: mode[name] for name in posterior.mean})
        assert_same_bits({**posterior.constants, **posterior.mean}, {name: mode[name] for name in mode})
    other, x = normed(), blobs().tensors[0]
    draws = [PosteriorSamples(q, 2, vogn.seed + index) for index, q in enumerate(modes.posteriors)]
    with torch.no_grad():
        each = []
        for samples, mode in zip(draws, modes.modes, strict=True):
            other.load_state_dict(mode)
            each.append(samples.outputs(other.eval(), lambda: other(x)).softmax(-1).mean(0))
    expected = torch.stack(each).mean(0)
    torch.testing.assert_close(scored(module, vogn, modes), expected)
    fresh = [VOGNCallback(eval_samples=6), four_modes()]
    torch.testing.assert_close(scored(normed(seed=3), *fresh, ckpt_path=tmp_path / "last.ckpt"), expected)


def test_posteriors_around_modes_resume_bit_for_bit(tmp_path):
    class Save(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 5:  # update 36, after the second mode
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, again = four_modes(), four_modes()
    fit(normed(), VOGNCallback(relative_noise=0.3), whole, Save(), max_epochs=8)
    trainer = quiet_trainer(VOGNCallback(relative_noise=0.3), again, max_epochs=8)
    trainer.fit(normed(seed=1), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert len(again.posteriors) == 4
    for one, other in zip(again.posteriors, whole.posteriors, strict=True):
        assert_same_bits(one.mean, other.mean)
        assert_same_bits(one.variance(), other.variance())
