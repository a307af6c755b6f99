"""`SWAGCallback` against weights collected by hand, and Multi-SWAG against members sampled by hand."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import Classifier, NormedClassifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights

from lightning_bayes import DeepEnsembleCallback, SWAGCallback, load_posterior, mc_predict
from lightning_bayes.callbacks import posthoc
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


def test_too_few_epochs_are_refused_before_the_fit():
    with pytest.raises(
        HyperparameterError, match=r"at least 2 epochs, but start=0\.75 and every=1 leave 1 of max_epochs=1"
    ):
        fit(NormedClassifier(), SWAGCallback())
    with pytest.raises(HyperparameterError, match=r"samples=-1 must be a whole number"):
        DeepEnsembleCallback(["a.ckpt"], samples=-1)
