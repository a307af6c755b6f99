"""`LaplaceCallback` after fits and on checkpoints, against `laplace` and `mc_predict` in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, NormedClassifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Calibration, LaplaceCallback, laplace, load_posterior, mc_predict
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.posteriors import EigenGaussian, MeanField
from lightning_bayes.zoo import BayesRegressor

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")
EPOCHS = 3


def trained(callback, **kwargs):
    torch.manual_seed(0)
    module = NormedClassifier()
    return module, fit(module, callback, max_epochs=EPOCHS, **kwargs)


def scored(module, callback, *others, **kwargs):
    module.seen = []
    quiet_trainer(callback, *others).test(module, loader(), verbose=False, **kwargs)
    return torch.cat(module.seen).softmax(1)


def expected(module, **arguments):
    """The linearised prediction in closed form."""
    model = module.eval()
    found = laplace(model, loader(), "classification", **arguments)
    return found, mc_predict(model, found.posterior, blobs().tensors[0], linearized="closed_form").probs


def test_a_fit_ends_with_the_laplace_approximation_and_is_tested_under_it():
    callback = LaplaceCallback()
    module, trainer = trained(callback)
    found, probs = expected(module)
    assert sorted(callback.posterior.mean) == ["net.3.bias", "net.3.weight"]
    assert isinstance(callback.posterior, EigenGaussian)
    assert float(trainer.callback_metrics["laplace/log_marginal_likelihood"]) == pytest.approx(
        found.log_marginal_likelihood, rel=1e-4
    )
    torch.testing.assert_close(scored(module, callback), probs)


def test_training_is_that_without_the_callback():
    plain = NormedClassifier.__new__(NormedClassifier)
    torch.manual_seed(0)
    plain.__init__()
    fit(plain, max_epochs=EPOCHS)
    assert_same_bits(weights(trained(LaplaceCallback())[0]), weights(plain))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("linearized", [False, True, "closed_form"])
def test_a_checkpoint_keeps_the_posterior(tmp_path, structure, linearized):
    callback = LaplaceCallback(structure, r"^net\.", linearized=linearized, eval_samples=4)
    module, trainer = trained(callback)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = LaplaceCallback(structure, r"^net\.", linearized=linearized, eval_samples=4)
    found = scored(NormedClassifier(), again, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(found, scored(module, callback))
    posterior = load_posterior(tmp_path / "last.ckpt")
    assert_same_bits(posterior.variance(), callback.posterior.variance())
    assert {*posterior.mean, *posterior.constants} == set(module.state_dict())
    direct = mc_predict(module.eval(), posterior, blobs().tensors[0], 4, linearized=linearized).probs
    torch.testing.assert_close(found, direct)


def test_a_checkpoint_without_a_posterior_gets_one_before_its_test(tmp_path):
    torch.manual_seed(0)
    module = NormedClassifier()
    fit(module, max_epochs=EPOCHS).save_checkpoint(tmp_path / "adam.ckpt")
    callback = LaplaceCallback(likelihood="classification")
    other = NormedClassifier()
    other.train_dataloader = lambda: loader()
    found = scored(other, callback, ckpt_path=tmp_path / "adam.ckpt")
    torch.testing.assert_close(found, expected(module)[1])
    assert callback.result is not None


@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
def test_a_test_of_a_checkpoint_chooses_the_prior_on_the_modules_validation_set(tmp_path):
    torch.manual_seed(0)
    module = NormedClassifier()
    fit(module, max_epochs=EPOCHS).save_checkpoint(tmp_path / "adam.ckpt")
    module.train_dataloader, module.val_dataloader = lambda: loader(), lambda: loader(examples=24)
    callback = LaplaceCallback(likelihood="classification")
    scored(module, callback, ckpt_path=tmp_path / "adam.ckpt")
    found = laplace(module.eval(), loader(), prior_precision="validation", validation=loader(examples=24))
    assert callback.result.prior_precision == pytest.approx(found.prior_precision, rel=1e-3)


def test_without_training_data_it_says_where_they_come_from(tmp_path):
    module = NormedClassifier()
    with pytest.raises(
        UnsupportedTrainingError, match=r"LaplaceCallback needs training batches, but there was no fit with it"
    ):
        scored(module, LaplaceCallback())


def test_no_samples_are_the_network():
    callback = LaplaceCallback(eval_samples=0)
    module, _ = trained(callback)
    with torch.no_grad():
        torch.testing.assert_close(scored(module, callback), module.eval()(blobs().tensors[0]).softmax(1))


@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
def test_the_width_is_chosen_on_the_validation_set():
    callback, width = LaplaceCallback(), Calibration()
    torch.manual_seed(0)
    module = NormedClassifier()
    trainer = quiet_trainer(callback, width, max_epochs=EPOCHS)
    trainer.fit(module, loader(), loader(examples=24))
    assert width.scale is not None
    found = scored(module, callback, width)
    scaled = width.scaled(callback.posterior)
    direct = mc_predict(module.eval(), scaled, blobs().tensors[0], linearized="closed_form").probs
    torch.testing.assert_close(found, direct)


@pytest.mark.parametrize("prior", [None, "validation"])
@pytest.mark.filterwarnings("ignore:The search for the prior precision ended at an edge")
def test_the_prior_is_chosen_on_the_validation_set(prior):
    callback = LaplaceCallback(prior_precision=prior)
    torch.manual_seed(0)
    module = NormedClassifier()
    quiet_trainer(callback, max_epochs=EPOCHS).fit(module, loader(), loader(examples=24))
    found = laplace(module.eval(), loader(), prior_precision="validation", validation=loader(examples=24))
    assert callback.result.prior_precision == pytest.approx(found.prior_precision, rel=1e-3)


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_prior_is_chosen_by_marginal_likelihood_without_a_validation_set_or_where_asked(loaders):
    callback = LaplaceCallback(prior_precision=None if loaders == 1 else "marglik")
    torch.manual_seed(0)
    module = NormedClassifier()
    quiet_trainer(callback, max_epochs=EPOCHS).fit(module, *[loader()] * loaders)
    found = laplace(module.eval(), loader())
    assert callback.result.prior_precision == pytest.approx(found.prior_precision, rel=1e-3)


def test_a_regression_has_the_noise_of_its_module_or_of_the_evidence():
    x = torch.linspace(-1, 1, 40)[:, None]
    data = DataLoader(TensorDataset(x, 2 * x + 0.1 * torch.cos(20 * x)), batch_size=10)
    task = BayesRegressor(nn.Linear(1, 1), noise_std=0.2, optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    callback = LaplaceCallback("full")
    fit(task, callback, data=data, max_epochs=30)
    assert isinstance(callback.result.likelihood, Gaussian)
    assert callback.result.likelihood.std == pytest.approx(0.2)

    module = Classifier(lambda m: torch.optim.Adam(m.parameters(), lr=0.1), nn.Linear(1, 1), F.mse_loss)
    callback = LaplaceCallback("full")
    fit(module, callback, data=data, max_epochs=30)
    assert callback.result.likelihood.std == pytest.approx(0.07, rel=0.2)


def test_online_the_weight_decay_becomes_the_prior_precision():
    torch.manual_seed(0)
    module = NormedClassifier()
    module.configure = lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)
    callback = LaplaceCallback("diagonal", "all", online_every=2)
    trainer = fit(module, callback, max_epochs=3)
    (decay,) = {group["weight_decay"] for group in trainer.optimizers[0].param_groups}
    assert isinstance(callback.posterior, MeanField)
    assert 0 < decay < 1
    before = NormedClassifier()
    torch.manual_seed(0)
    before.__init__()
    before.configure = module.configure
    fit(before, max_epochs=2)
    found = laplace(before.eval(), loader(), structure="diagonal", subset="all")
    assert decay * 48 == pytest.approx(next(iter(found.prior_precision.values())), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "kron"}, r"structure='kron' is unknown"),
        ({"eval_samples": -1}, r"eval_samples=-1 must be a whole number of at least 0"),
        ({"linearized": "probit"}, r"linearized='probit' is unknown"),
        (
            {"online_every": 1},
            r"online_every=1 sets the weight decay of all weights.*subset='all' \(now 'last_layer'\)",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        LaplaceCallback(**arguments)


def test_a_subset_that_matches_nothing_is_refused_before_the_fit():
    module = Classifier()
    with pytest.raises(UnsupportedLayerError, match=r"subset='last' matches no .* Pass subset='last_layer'"):
        fit(module, LaplaceCallback(subset="last"))
    assert module.trainer.global_step == 0


def test_mc_predict_takes_the_result_of_laplace():
    module = Classifier()
    inputs, labels = blobs().tensors
    result = laplace(module.eval(), [(inputs, labels)], require_trained=False)
    found, expected = (mc_predict(module, q, inputs) for q in (result, result.posterior))
    assert torch.equal(found.probs, expected.probs)


def test_online_needs_an_l2_penalty():
    with pytest.raises(UnsupportedTrainingError, match=r"which AdamW does not have.*Use Adam or SGD"):
        trained(LaplaceCallback(subset="all", online_every=1))


def test_a_full_matrix_that_does_not_fit_is_refused_before_the_fit():
    module = Classifier(net=nn.Sequential(nn.Linear(4, 6000), nn.Tanh(), nn.Linear(6000, 3)))
    with pytest.raises(PosteriorError, match=r"structure='full' of 48,003 parameters"):
        fit(module, LaplaceCallback("full", "all"))
    assert module.training_steps == 0


def test_a_fit_that_is_no_better_than_chance_is_not_lost():
    module, callback = NormedClassifier(), LaplaceCallback()
    fit(module, callback, limit_train_batches=1)
    assert callback.posterior is not None
    with pytest.raises(UnsupportedTrainingError, match=r"NormedClassifier was not trained: its NLL"):
        scored(untrained(), LaplaceCallback(likelihood="classification"))


def untrained():
    module = NormedClassifier()
    nn.init.zeros_(module.net[3].weight)
    nn.init.zeros_(module.net[3].bias)
    module.train_dataloader = lambda: loader()
    return module
