"""A regressor with learned noise under a callback: the posterior, the noise and the test's mixture are consistent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributions import Categorical, MixtureSameFamily, StudentT
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import NoisyKFACCallback, VOGNCallback, load_posterior, mc_predict
from lightning_bayes.zoo import MLP, BayesRegressor

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@pytest.fixture
def batches(generator):
    x = torch.randn(200, 2, generator=generator)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(200, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=50)


def fit(callback, batches, path):
    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=0.02)
    task = BayesRegressor(MLP(2, 1, hidden=(8,)), adam, noise="gamma", noise_prior=(1.0, 0.1))
    trainer = Trainer(max_epochs=20, callbacks=[callback], log_every_n_steps=1, **QUIET)
    trainer.fit(task, batches, batches)
    trainer.save_checkpoint(path)
    return task


@pytest.mark.parametrize("callback", [VOGNCallback, NoisyKFACCallback])
def test_the_test_likelihood_is_the_mixture_over_the_callbacks_own_samples(callback, batches, tmp_path):
    path = tmp_path / "last.ckpt"
    task = fit(callback(eval_samples=16), batches, path)
    assert task.lightning_bayes_likelihood.std == pytest.approx(0.3, rel=0.35)
    (results,) = Trainer(callbacks=[callback(eval_samples=16)], **QUIET).test(
        task, batches, ckpt_path=path, verbose=False
    )
    x, y = batches.dataset.tensors
    samples = mc_predict(MLP(2, 1, hidden=(8,)), load_posterior(path).select("model."), x, 16, link="identity").samples
    shape, rate = (value.double() for value in task.noise.posterior())  # log-gammas of 100 cancel
    components = StudentT(2 * shape, samples[..., 0].T.double(), (rate / shape).sqrt())
    mixture = MixtureSameFamily(Categorical(torch.ones(200, 16)), components)
    assert results["test/reg/NLL"] == pytest.approx(-mixture.log_prob(y).mean().item(), rel=1e-4)
