"""`SWAGCallback` against weights collected by hand, and Multi-SWAG against members sampled by hand."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import Classifier, NormedClassifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights
from torch.utils.data import DataLoader, IterableDataset

from lightning_bayes import DeepEnsembleCallback, SWAGCallback, load_posterior, mc_predict
from lightning_bayes.callbacks.posthoc import base as posthoc
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.predictive import PosteriorSamples, temporary_weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


class Iterates(Callback):
    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, module):
        self.found.append({name: p.detach().clone() for name, p in module.named_parameters()})


def trained(*callbacks, seed=0, **kwargs):
    torch.manual_seed(seed)
    module = NormedClassifier()
    return module, fit(module, *callbacks, max_epochs=8, **kwargs)


def scored(module, callback, **kwargs):
    module.seen = []
    quiet_trainer(callback).test(module, loader(), verbose=False, **kwargs)
    return torch.cat(module.seen).softmax(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("swag") / "last.ckpt"
    iterates, callback = Iterates(), SWAGCallback(start=0.5, eval_samples=5)
    module, trainer = trained(iterates, callback)
    trainer.save_checkpoint(path)
    return module, callback, iterates.found, path


def test_it_collects_the_last_epochs_of_an_ordinary_fit(run):
    module, callback, found, _ = run
    plain = Iterates()
    trained(plain)
    for one, other in zip(found, plain.found, strict=True):
        assert_same_bits(one, other)
    for name, mean in callback.posterior.mean.items():
        stacked = torch.stack([each[name] for each in found[4:]]).double()
        torch.testing.assert_close(mean, stacked.mean(0).float())
        torch.testing.assert_close(callback.posterior.diagonal[name], (stacked.var(0, correction=0) / 2).float())
        assert torch.equal(dict(module.named_parameters())[name], mean)
    assert callback.moments.count == 4


@pytest.mark.parametrize("module", [Classifier, NormedClassifier])
def test_only_the_first_batch_is_copied(monkeypatch, module):
    copies = []
    monkeypatch.setattr(posthoc, "copied", lambda batch: copies.append(batch) or batch)
    fit(module(), SWAGCallback(start=0.5), max_epochs=4)
    assert len(copies) == 1


def test_batch_norm_has_the_statistics_of_the_mean(run):
    module = run[0]
    with torch.no_grad():
        hidden = [module.net[0](x) for x, _ in loader()]
    torch.testing.assert_close(module.net[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))


def test_a_checkpoint_keeps_the_posterior(run):
    module, callback, _, path = run
    posterior = load_posterior(path)
    expected = mc_predict(module.eval(), posterior, blobs().tensors[0], 5).probs
    torch.testing.assert_close(scored(module, callback), expected)
    torch.testing.assert_close(scored(NormedClassifier(), SWAGCallback(eval_samples=5), ckpt_path=path), expected)
    plain = module.net(blobs().tensors[0]).softmax(1)
    assert (expected - plain).abs().max() > 1e-4


def test_a_resumed_fit_goes_on_collecting(tmp_path, run):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 5:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    trained(SWAGCallback(start=0.5), Stop())
    again = SWAGCallback(start=0.5)
    trainer = quiet_trainer(again, max_epochs=8)
    trainer.fit(NormedClassifier(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert again.moments.count == 4
    for name, mean in again.posterior.mean.items():
        torch.testing.assert_close(mean, run[1].posterior.mean[name])


def test_the_learning_rate_is_held():
    rates = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trained(SWAGCallback(start=0.5, lr=0.3), Rates())
    assert rates == [1e-2] * 24 + [0.3] * 24


def test_multi_swag_samples_every_member(tmp_path):
    paths, x = [], blobs().tensors[0]
    for seed in range(2):
        _, trainer = trained(SWAGCallback(start=0.5), seed=seed)
        paths.append(tmp_path / f"{seed}.ckpt")
        trainer.save_checkpoint(paths[-1])
    module = NormedClassifier()
    before = weights(module)
    found = scored(module, DeepEnsembleCallback(paths, samples=3))
    each = []
    for seed, path in enumerate(paths):
        posterior = load_posterior(path)
        draws = PosteriorSamples(posterior, 3, seed)
        with temporary_weights(module, posterior.constants), torch.no_grad():
            each.append(draws.outputs(module.eval(), lambda: module(x)).softmax(-1).mean(0))
    torch.testing.assert_close(found, torch.stack(each).mean(0))
    assert_same_bits(weights(module), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 1.0}, r"start=1\.0 must be at least 0 and below 1"),
        ({"every": 0}, r"every=0 a whole number"),
        ({"lr": -1.0}, r"lr=-1\.0 positive"),
        ({"max_rank": 1}, r"max_rank=1 must be"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        SWAGCallback(**arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"every": 9}, {"max_epochs": 4}, r"at least 2 epochs, but start=0\.75 and every=9 leave 1 of 4"),
        ({}, {"max_epochs": 1}, r"at least 2 updates, but start=0\.75 leaves fewer of 6"),
    ],
)
def test_fits_that_are_too_short_are_refused_before_they_start(arguments, options, message):
    with pytest.raises(HyperparameterError, match=message):
        fit(NormedClassifier(), SWAGCallback(**arguments), **options)


def test_a_number_of_samples_is_not_negative():
    with pytest.raises(HyperparameterError, match=r"samples=-1 must be a whole number"):
        DeepEnsembleCallback(["a.ckpt"], samples=-1)


# -- fits that do not end by epochs ----------------------------------------------------------------------------------------


class Updates(Callback):
    """The weights after each update, and after each epoch."""

    def __init__(self):
        self.after_update, self.after_epoch = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after_update.append(weights(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.after_epoch.append(weights(pl_module))


def mean_of(iterates, name="net.0.weight"):
    return torch.stack([iterate[name].double() for iterate in iterates]).mean(0).float()


@pytest.mark.parametrize("options", [{"max_steps": 24, "max_epochs": -1}, {"max_steps": 21, "max_epochs": 9}])
def test_a_fit_that_ends_by_steps_collects_its_last_epochs(options):
    callback, seen = SWAGCallback(start=0.5), Updates()
    fit(Classifier(), seen, callback, **options)
    assert callback.moments.count == 2
    torch.testing.assert_close(callback.posterior.mean["net.0.weight"], mean_of(seen.after_epoch[2:]))


@pytest.mark.parametrize(
    "options", [{"max_epochs": 1}, {"max_steps": 40, "max_epochs": -1}, {"max_steps": 9, "max_epochs": -1}]
)
def test_a_fit_of_one_epoch_collects_within_it(options):
    callback, seen = SWAGCallback(start=0.5, max_rank=4), Updates()
    fit(Classifier(), seen, callback, data=loader(1), **{"limit_train_batches": 40, **options})
    updates = len(seen.after_update)
    at = [math.ceil(updates * part / 8) - 1 for part in (5, 6, 7, 8)]
    assert callback.moments.count == 4
    torch.testing.assert_close(callback.posterior.mean["net.0.weight"], mean_of([seen.after_update[i] for i in at]))


def test_data_without_a_length_are_collected_by_steps():
    class Stream(IterableDataset):
        def __iter__(self):
            while True:
                yield from blobs()

    callback = SWAGCallback(start=0.5, max_rank=5, num_data=48)
    fit(Classifier(), callback, data=DataLoader(Stream(), batch_size=8), max_steps=20, max_epochs=-1)
    assert callback.moments.count == 5


def test_a_fit_that_ends_by_time_collects_in_its_last_part(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: float(next(clock)))
    callback = SWAGCallback(start=0.5, max_rank=5)
    trainer = fit(Classifier(), callback, max_time={"seconds": 600}, max_epochs=-1)
    assert 2 <= callback.moments.count <= 5
    assert trainer.global_step > 10


def test_a_fit_that_a_later_callback_ends_has_a_posterior():
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 5

    callback = SWAGCallback(start=0.5)
    fit(Classifier(), callback, Stop(), max_epochs=8)
    assert callback.moments.count == 2
    assert callback.posterior is not None
