"""Logs and warnings of `PosteriorDiagnostics`, with the callbacks that train a posterior."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tiny_training import EXAMPLES, Classifier, fit, weights

import lightning_bayes
from lightning_bayes import OGNCallback, PosteriorDiagnostics, VariationalCallback, VOGNCallback
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError

NUMBERS = ("noise_to_weight", "kl", "kl_per_example", "precision_q05", "precision_q50", "precision_q95", "data_share")
LAYERS = ("net.0", "net.2")


class LastStep(Callback):
    """The means before and after each batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = weights(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps = {name: value - self.before[name] for name, value in weights(pl_module).items()}


def joined(tensors, layer=""):
    return torch.cat([value.flatten() for name, value in tensors.items() if name.startswith(layer)]).double()


def test_the_numbers_are_those_of_the_posterior_by_hand():
    callback, last = VOGNCallback(prior_precision=3.0, relative_noise=1.0), LastStep()
    metrics = fit(Classifier(), callback, PosteriorDiagnostics(), last, max_epochs=2).callback_metrics
    q, optimizer = callback.optimizer.posterior(), callback.optimizer
    names = {name: param for name, param in optimizer.model.named_parameters()}
    curvatures = {name: optimizer.state[param]["curvature"] for name, param in names.items()}
    strengths = {name: (3.0 / EXAMPLES + 0.03 * s.mean()).expand_as(s) for name, s in curvatures.items()}
    for suffix, layer in (("", ""), ("/net.0", "net.0"), ("/net.2", "net.2")):
        mean, precision = joined(q.mean, layer), joined(q.precision, layer)
        s, strength = joined(curvatures, layer), joined(strengths, layer)
        centre = mean * (1 - (3.0 / EXAMPLES / strength).sqrt())
        prior = torch.distributions.Normal(centre, (precision * strength / (s + strength)).rsqrt())
        posterior = torch.distributions.Normal(mean, precision.rsqrt())
        kl = torch.distributions.kl_divergence(posterior, prior).sum()
        expected = {
            "noise_to_weight": (precision.reciprocal().sum() / mean.square().sum()).sqrt(),
            "kl": kl,
            "kl_per_example": kl / EXAMPLES,
            "precision_q05": precision.quantile(0.05),
            "precision_q50": precision.quantile(0.5),
            "precision_q95": precision.quantile(0.95),
            "data_share": (s / (s + strength)).mean(),
            "step_to_noise": (joined(last.steps, layer).square().sum() / precision.reciprocal().sum()).sqrt(),
        }
        for number, value in expected.items():
            found = float(metrics[f"posterior/{number}{suffix}"])
            assert found == pytest.approx(float(value), rel=1e-3), (number, suffix)
    assert 0 < metrics["posterior/data_share"] < 1


NOISY = [
    found
    for name in lightning_bayes.__all__
    if isinstance(found := getattr(lightning_bayes, name), type)
    and issubclass(found, VariationalCallback)
    and found is not VariationalCallback
    and found().optimizer_class.noisy
]


@pytest.mark.filterwarnings("ignore:The curvature has collapsed")  # a Hessian may be negative after six batches
@pytest.mark.parametrize("callback_class", NOISY, ids=lambda found: found.__name__)
def test_every_callback_that_trains_a_posterior_is_diagnosed(callback_class):
    callback = callback_class()
    metrics = fit(Classifier(), callback, PosteriorDiagnostics(per_layer=False)).callback_metrics
    assert all(metrics[f"posterior/{number}"].isfinite() for number in (*NUMBERS, "step_to_noise"))
    kl = float(callback.optimizer.posterior().kl())
    assert float(metrics["posterior/kl"]) == pytest.approx(kl, rel=1e-5)


def test_layers_can_be_left_out_of_the_log():
    metrics = fit(Classifier(), VOGNCallback(), PosteriorDiagnostics(per_layer=False)).callback_metrics
    found = {name for name in metrics if name.startswith("posterior/")}
    ours = {"posterior/effective_parameters", "posterior/skipped_updates"}
    assert found - ours == {f"posterior/{number}" for number in (*NUMBERS, "step_to_noise")}


@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_it_looks_every_so_many_epochs(every, epochs, tmp_path):
    logger = CSVLogger(tmp_path)
    fit(Classifier(), VOGNCallback(), PosteriorDiagnostics(every), logger=logger, max_epochs=4)
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file) if row["posterior/kl"]] == epochs


def test_an_epoch_that_was_cut_short_has_no_last_step():
    metrics = fit(Classifier(), VOGNCallback(), PosteriorDiagnostics(), max_epochs=None, max_steps=3).callback_metrics
    assert "posterior/step_to_noise" not in metrics
    assert metrics["posterior/kl"] > 0


def warnings_of(*callbacks, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Classifier(), *callbacks, **options)
    return [str(w.message) for w in caught if "noise" in str(w.message)]


def test_noise_that_drowns_the_weights_is_warned_about_once_with_the_layers_names():
    loose = VOGNCallback(lr=1e-6, prior_precision=1e-2, num_data=1)
    (text,) = (t for t in warnings_of(loose, PosteriorDiagnostics(), max_epochs=3) if "larger than the weights" in t)
    assert "larger than the weights in net.0, net.2, so predictions" in text
    assert "in units of the weights, with max_noise." in text


def test_a_collapsed_curvature_is_warned_about_once_with_the_layers_names():
    (text,) = warnings_of(VOGNCallback(prior_precision=1e6), PosteriorDiagnostics(), max_epochs=3)
    assert "curvature has collapsed in net.0, net.2: the data contribute less than 1% of the precision" in text


def test_a_dead_layer_is_the_only_one_named():
    class Dead(Classifier):
        def forward(self, x):
            return self.net[2](torch.relu(self.net[0](x) - 1e3))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Dead(), VOGNCallback(num_data=10**6), PosteriorDiagnostics())
    (text,) = (str(w.message) for w in caught if "collapsed" in str(w.message))
    assert "collapsed in net.0: " in text


def test_a_healthy_posterior_is_not_warned_about():
    assert warnings_of(VOGNCallback(num_data=10**5), PosteriorDiagnostics(), max_epochs=3) == []


def test_without_a_posterior_there_is_nothing_to_diagnose():
    with pytest.raises(UnsupportedTrainingError, match=r"found no callback that trains a posterior\. Add one, such as"):
        fit(Classifier(), PosteriorDiagnostics())
    with pytest.raises(UnsupportedTrainingError, match=r"OGNCallback trains a point estimate.*Remove it"):
        fit(Classifier(), OGNCallback(), PosteriorDiagnostics())


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_no_whole_number_of_epochs_from_one_is_refused(every):
    with pytest.raises(HyperparameterError, match=rf"every_n_epochs={every!r} must be a whole number of at least 1"):
        PosteriorDiagnostics(every)


def test_the_order_of_the_callbacks_does_not_matter():
    orders = ([VOGNCallback(), PosteriorDiagnostics()], [PosteriorDiagnostics(), VOGNCallback()])
    first, second = (fit(Classifier(), *callbacks).callback_metrics for callbacks in orders)
    assert {k: float(v) for k, v in first.items()} == {k: float(v) for k, v in second.items()}


def test_looking_changes_nothing():
    plain, looked_at = Classifier(), Classifier()
    fit(plain, VOGNCallback(), max_epochs=2)
    fit(looked_at, VOGNCallback(), PosteriorDiagnostics(), max_epochs=2)
    for a, b in zip(plain.parameters(), looked_at.parameters(), strict=True):
        assert torch.equal(a, b)
