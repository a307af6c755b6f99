"""Twenty modules of users under `VOGNCallback`: steps and predictions see averages over posterior samples, as by hand."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from tiny_training import assert_same_bits, quiet_trainer, weights
from torch.utils.data import DataLoader
from users_modules import MODULES

from lightning_bayes import Predictor, VOGNCallback, load_posterior, mc_predict, zoo
from lightning_bayes.likelihood import leaf_at
from lightning_bayes.likelihood.paths import leaves
from lightning_bayes.predictive import PosteriorSamples, temporary_weights

S = 5
pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:.*all examples share these"),  # position embeddings of transformers
    pytest.mark.filterwarnings("ignore:The posterior does not tell how outputs become predictions"),
    pytest.mark.filterwarnings("ignore:The loss does not show how it reduces"),  # a mean over selected targets
]


def fitted(user):
    torch.manual_seed(0)
    module, data = user.module(), DataLoader(user.batches(), batch_size=None)
    callback = VOGNCallback(eval_samples=S, relative_noise=0.3, link=user.link, calibrate=False, num_data=24)
    trainer = quiet_trainer(callback, max_epochs=2)
    trainer.fit(module, data, data)
    return module.eval(), callback, trainer, data


def under_samples(module, callback, run):
    """What `run` returns under each sample of the posterior."""
    samples, results = PosteriorSamples(callback.optimizer.posterior(), S, callback.seed), []
    with torch.no_grad():
        for index in range(S):
            with temporary_weights(module, samples.tensors(index)):
                results.append(run())
    return results


def averaged(values, kind):
    """The prediction from the outputs of all samples, by hand."""
    if kind == "sigmoid":
        return values.sigmoid().mean(0)
    if kind == "rate":
        return values.exp().mean(0)
    return values.mean(0) if kind == "mean" else values.softmax(kind if kind < 0 else kind + 1).mean(0)


def as_prediction(output, kind):
    """The prediction that an output of ``self(x)`` stands for."""
    if kind == "sigmoid":
        return output.sigmoid()
    if kind == "rate":
        return output.exp()
    return output if kind == "mean" else output.softmax(kind)


def is_available(name):
    if name.startswith(("BERT", "T5")):
        pytest.importorskip("transformers")
    return MODULES[name]


def validated(module, trainer, data):
    """What a validation logs, and what ``self(...)`` returns in its steps."""
    seen = []

    def step(batch, batch_idx):
        keep, module.forward = module.forward, lambda *a, **k: seen.append(keep(*a, **k)) or seen[-1]
        try:
            type(module).validation_step(module, batch, batch_idx)
        finally:
            module.forward = keep

    module.validation_step = step
    (scores,) = trainer.validate(module, data, verbose=False)
    del module.validation_step
    return scores, seen


def structure_of(output):
    """Containers, paths, shapes and types of an output."""
    tensors = [(path, leaf.shape, leaf.dtype) for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    return type(output), [path for path, _ in leaves(output)], tensors


@pytest.mark.parametrize("name", MODULES)
def test_validation_has_the_structure_of_plain_lightnings_and_its_numbers_at_the_mean(name):
    user = is_available(name)
    module, callback, trainer, data = fitted(user)
    before = weights(module)
    plain_scores, alone = validated(module, quiet_trainer(), data)
    scores, seen = validated(module, trainer, data)
    assert scores.keys() == plain_scores.keys()
    assert scores["loss"] != plain_scores["loss"]
    assert [structure_of(output) for output in seen] == [structure_of(output) for output in alone]
    callback.eval_samples = 0
    at_mean, _ = validated(module, trainer, data)
    assert at_mean == pytest.approx(plain_scores, rel=1e-6)
    assert_same_bits(weights(module), before)


@pytest.mark.parametrize("name", MODULES)
def test_steps_and_predictions_are_averages_over_samples(name):
    user = is_available(name)
    module, callback, trainer, data = fitted(user)
    seen, forward = [], module.forward

    def step(batch, batch_idx):
        keep, module.forward = module.forward, lambda *a, **k: seen.append(keep(*a, **k)) or seen[-1]
        try:
            type(module).test_step(module, batch, batch_idx)
        finally:
            module.forward = keep

    module.test_step = step
    (scores,) = trainer.test(module, data, verbose=False)
    assert scores["loss"] == scores["loss"]
    assert module.forward == forward
    calls = []
    module.forward = lambda *a, **k: calls.append((a, k)) or forward(*a, **k)
    with torch.no_grad():
        module.loss(user.batches()[0])
    del module.forward
    args, kwargs = calls[0]
    outputs = under_samples(module, callback, lambda: forward(*args, **kwargs))
    for path, kind in user.takes.items():
        expected = averaged(torch.stack([leaf_at(output, path) for output in outputs]), kind)
        found = as_prediction(leaf_at(seen[0], path), kind)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_predict_returns_averages_in_the_units_of_the_user(name):
    user = is_available(name)
    module, callback, trainer, data = fitted(user)
    first, batch = trainer.predict(module, data)[0], user.batches()[0]
    if type(module).predict_step is LightningModule.predict_step:
        assert_default(first, user, under_samples(module, callback, lambda: plain(module, batch)))
        return
    each = under_samples(module, callback, lambda: module.predict_step(batch, 0))
    for key, value in first.items():
        if key in each[0] and value.is_floating_point():
            values = torch.stack([result[key] for result in each])
            torch.testing.assert_close(value, values.mean(0), rtol=1e-3, atol=1e-4)
            variance = first["variance" if key == "mean" else f"{key}_variance"]
            torch.testing.assert_close(variance, values.var(0, correction=0), rtol=1e-2, atol=1e-5)
        elif key in each[0]:
            votes = torch.stack([result[key] for result in each])
            torch.testing.assert_close(first[f"{key}_share"], (votes == value).float().mean(0))


@pytest.mark.parametrize("name", MODULES)
def test_posterior_files_and_mc_predict_return_the_same_averages(name, tmp_path):
    user = is_available(name)
    module, callback, trainer, _ = fitted(user)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    posterior, batch = load_posterior(tmp_path / "run.ckpt"), user.batches()[0]
    inputs = batch if isinstance(batch, dict) else tuple(batch[:2]) if name == "two inputs" else batch[0]
    found = [mc_predict(module, posterior, inputs, S, seed=callback.seed, link=user.link)]
    if user.link is None:  # a file does not hold a function
        zoo.save_posterior(tmp_path / "run.safetensors", module, posterior)
        load = {"model": user.module(), "samples": S, "seed": callback.seed}
        found.append(Predictor.load(tmp_path / "run.safetensors", **load)(inputs))
    outputs = under_samples(module, callback, lambda: module(*inputs) if name == "two inputs" else plain(module, batch))
    for path, kind in user.takes.items():
        expected = averaged(torch.stack([leaf_at(output, path) for output in outputs]), kind)
        for prediction in found:
            leaf = prediction if len(user.takes) == 1 else leaf_at(prediction, path)
            torch.testing.assert_close(leaf[0], expected, rtol=1e-3, atol=1e-5)


def plain(module, batch):
    """What Lightning's step would pass, without the targets."""
    if isinstance(batch, dict):
        return module(
            **{name: value for name, value in batch.items() if name != "labels" or module.net.config.is_encoder_decoder}
        )
    return module(batch[0])


def assert_default(first, user, outputs):
    """The default step returns the summary of each leaf."""
    for path, kind in user.takes.items():
        expected = averaged(torch.stack([leaf_at(output, path) for output in outputs]), kind)
        summary = leaf_at(first, path)
        torch.testing.assert_close(summary["mean" if "mean" in summary else "probs"], expected, rtol=1e-3, atol=1e-5)
