"""What a user's ``predict_step`` returns is averaged over samples, in its own units, as by a loop over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import LaplaceCallback, MCDropoutCallback, VOGNCallback
from lightning_bayes.predictive import PosteriorSamples
from lightning_bayes.predictive.closed_form import output_moments

S = 6
X = torch.rand(24, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
Y = 1000 + 300 * X.sin()
LOADER = DataLoader(TensorDataset(X, Y), 12)


class Net(Classifier):
    """A regression on standardised targets, whose predict step is `found`."""

    def __init__(self, found):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.05), net, F.mse_loss)
        self.found, self.runs = found, 0

    def training_step(self, batch, index):
        return self.loss(self(batch[0]), (batch[1] - 1000) / 300)

    def predict_step(self, batch, index):
        return self.found(self, batch[0])


def predicted(found, callback=None, **options):
    """The predictions of all rows by column, the module and the callback."""
    net, callback = Net(found), callback or VOGNCallback(eval_samples=S, relative_noise=0.3, **options)
    trainer = quiet_trainer(callback, max_epochs=3)
    trainer.fit(net, LOADER)
    batches = trainer.predict(net, LOADER)
    if not isinstance(batches[0], dict):
        return batches, net, callback
    return (
        {name: torch.cat([torch.atleast_1d(torch.as_tensor(batch[name])) for batch in batches]) for name in batches[0]},
        net,
        callback,
    )


def by_hand(net, callback, found, x=X):
    """What the step returns under each sample, ``[S, …]``."""
    samples = PosteriorSamples(callback.optimizer.posterior(), S, callback.seed)
    net.eval()
    with torch.no_grad():
        each = [found(lambda *a, s=s: functional_call(net, samples.tensors(s), a), x) for s in range(S)]
    return torch.stack(each)


def assert_moments(found, values, name="price"):
    columns = {"": values.mean(0), "_variance": values.var(0, correction=0)}
    columns |= {"_lower": values.quantile(0.05, 0), "_upper": values.quantile(0.95, 0)}
    for end, expected in columns.items():
        torch.testing.assert_close(found[f"{name}{end}"], expected, rtol=1e-4, atol=1e-4)


PRICES = {  # functions of the outputs that users return
    "units of the data": lambda f, x: f(x) * 300 + 1000,
    "exponential": lambda f, x: f(x).exp() * 365,
    "soft argmax": lambda f, x: (f(x).softmax(-1) * torch.arange(2.0)).sum(-1),
    "reconstruction error": lambda f, x: (f(x) - x).square().mean(-1),
    "two calls": lambda f, x: f(x) - f(-x),
    "a call that depends on a call": lambda f, x: f(f(x)),
    "sum over the batch": lambda f, x: f(x).sum(0, keepdim=True).expand(len(x), 2),
}


@pytest.mark.parametrize("name", PRICES)
def test_real_values_get_the_moments_of_what_the_step_returns(name):
    step = PRICES[name]
    found, net, callback = predicted(lambda f, x: {"price": step(f, x)})
    expected = torch.cat([by_hand(net, callback, step, x) for x in X.split(12)], 1)
    assert_moments(found, expected)
    assert set(found) == {"price", "price_variance", "price_lower", "price_upper"}
    assert (found["price_variance"] > 0).any()


def test_the_mean_has_a_variance_and_constants_have_none():
    found, net, callback = predicted(lambda f, x: {"mean": f(x), "input": x, "scale": 300.0})
    values = by_hand(net, callback, lambda f, x: f(x))
    torch.testing.assert_close(found["mean"], values.mean(0))
    torch.testing.assert_close(found["variance"], values.var(0, correction=0))
    assert set(found) == {"mean", "variance", "lower", "upper", "input", "scale"}


def test_whole_numbers_get_the_most_frequent_and_the_share_that_agrees():
    def label(f, x):
        return (f(x)[:, 0] * 3).round().long()

    found, net, callback = predicted(lambda f, x: {"label": label(f, x)})
    votes = by_hand(net, callback, label)
    counts = (votes == found["label"]).sum(0)
    assert torch.equal(counts, torch.stack([(votes == vote).sum(0) for vote in votes]).amax(0))
    torch.testing.assert_close(found["label_share"], counts / S)


def test_arrays_stay_arrays_and_structures_stay_structures():
    batches, net, callback = predicted(lambda f, x: ((f(x) * 2).numpy(), {"text": "a", "rows": [f(x) * 2]}))
    values = by_hand(net, callback, lambda f, x: f(x) * 2)
    array = np.concatenate([first for first, _ in batches])
    np.testing.assert_allclose(array, values.mean(0), rtol=1e-4, atol=1e-5)
    assert batches[0][1]["text"] == "a"
    torch.testing.assert_close(torch.cat([second["rows"][0] for _, second in batches]), values.mean(0))


def test_layers_that_the_step_calls_itself_are_those_of_the_sample():
    found, net, callback = predicted(
        lambda module, x: {"price": module.net(x) if hasattr(module, "net") else module(x)}
    )
    assert_moments(found, by_hand(net, callback, lambda f, x: f(x)))


def test_random_numbers_are_those_of_one_run():
    state = torch.get_rng_state()
    found, _, _ = predicted(lambda f, x: {"noise": torch.randn(len(x), 1), "price": f(x)})
    assert "noise_variance" not in found  # the same under every sample
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_step_changes_the_module_once_for_each_batch():
    def counted(module, x):
        module.runs += 1
        return {"price": module(x)}

    _, net, _ = predicted(counted)
    assert net.runs == 2


def test_a_step_that_writes_files_runs_once_and_says_so(tmp_path, caplog):
    def written(module, x):
        module.runs += 1
        output = module(x)
        with open(tmp_path / f"{module.runs}.txt", "a") as file:
            file.write(f"{output.sum():.3f}\n")
        return {"price": output * 300}

    found, _, _ = predicted(written)
    assert [len((tmp_path / f"{run}.txt").read_text().splitlines()) for run in (1, 2)] == [1, 1]
    assert set(found) == {"price", "forward_variance"}
    assert caplog.text.count("so it runs once for each batch") == 1


def test_once_by_argument_averages_inside_and_names_the_columns_of_forward():
    runs = []
    found, net, callback = predicted(lambda f, x: runs.append(1) or {"price": f(x).exp()}, predict_once=True)
    values = by_hand(net, callback, lambda f, x: f(x))
    torch.testing.assert_close(found["price"], values.mean(0).exp())
    torch.testing.assert_close(found["forward_variance"], values.var(0, correction=0))
    assert len(runs) == 2


def test_the_noise_of_the_targets_stands_beside_the_mean_that_forward_states():
    callback = MCDropoutCallback(eval_samples=S, p=0.2, layers="net.1", link="mean_log_variance")
    net = Net(lambda f, x: (lambda mean: {"mean": mean, "price": mean * 300})(f(x)[:, 0]))
    net.loss = lambda f, y: ((y[:, 0] - f[:, 0]) ** 2 * (-f[:, 1]).exp() + f[:, 1]).mean()
    trainer = quiet_trainer(callback, max_epochs=3)
    trainer.fit(net, LOADER)
    first, _ = trainer.predict(net, LOADER)
    assert {"aleatoric", "variance", "lower", "upper"} <= set(first)
    assert "price_aleatoric" not in first


def test_the_closed_form_averages_what_the_step_returns():
    """S values with the mean and the variance of each output represent its Gaussian."""
    net, standardised = Net(lambda f, x: {"price": f(x) ** 2}), DataLoader(TensorDataset(X, X.sin()), 24)
    net.training_step = lambda batch, batch_idx: F.mse_loss(net(batch[0]), batch[1])
    callback = LaplaceCallback(eval_samples=S, likelihood="regression")
    trainer = quiet_trainer(callback, max_epochs=3)
    trainer.fit(net, standardised)
    (found,) = trainer.predict(net, standardised)
    mean, variance = output_moments(net, callback.posterior, lambda: net(X))
    torch.testing.assert_close(found["price"], mean**2 + variance, rtol=1e-3, atol=1e-5)
