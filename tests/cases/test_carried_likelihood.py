"""What comes after the fit reads what the loss said: checkpoint, mc_predict, Predictor and export agree with the fit."""

from __future__ import annotations

import copy

import pytest
import tiny_training
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import Predictor, SWAGCallback, VOGNCallback, calibrate, export, load_posterior, mc_predict, zoo
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Likelihood
from lightning_bayes.predictive import PosteriorSamples

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(32, 5, 3, generator=torch.Generator().manual_seed(1))
SAMPLES = 4


class Batches(Dataset):
    """Examples as dictionaries or tuples."""

    def __init__(self, *columns, names=()):
        self.columns, self.names = columns, names

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        row = tuple(column[index] for column in self.columns)
        return dict(zip(self.names, row, strict=True)) if self.names else row


class Net(tiny_training.Classifier):
    """Calls itself as a function of a batch says."""

    def __init__(self, net, step=None):
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), 0.05), copy.deepcopy(net), None)
        self.step = step

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)


class Two(nn.Module):
    """Takes two inputs, one of them by name."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, z):
        return self.one(x) + self.two(z)


class Logits(nn.Module):
    """Returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.net(x)
        return {"hidden": hidden.exp(), "logits": hidden}


def labels(x):
    return (x[..., 0] > 0).long()


CASES = {  # network, step, columns, names, an input, how outputs become the mean
    "regression near 100": (
        nn.Linear(3, 2),
        lambda m, b: F.mse_loss(m(b[0]), b[1]),
        (X, 100 + X[:, :2]),
        (),
        X[:4],
        lambda f: f,
    ),
    "two labels that are sure": (
        nn.Linear(3, 2),
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1]),
        (X, (X[:, :2] > -3).float()),
        (),
        X[:4],
        torch.sigmoid,
    ),
    "tokens": (
        nn.Linear(3, 6),
        lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()),
        (TOKENS, labels(TOKENS)),
        (),
        TOKENS[:4],
        lambda f: f.softmax(-1),
    ),
    "counts": (
        nn.Linear(3, 2),
        lambda m, b: F.poisson_nll_loss(m(b[0]), b[1]),
        (X, X[:, :2].abs().round()),
        (),
        X[:4],
        torch.exp,
    ),
    "two inputs": (
        Two(),
        lambda m, b: F.cross_entropy(m(b[0], z=b[1]), b[2]),
        (X, X.flip(0), labels(X)),
        (),
        (X[:4], X.flip(0)[:4]),
        lambda f: f.softmax(-1),
    ),
    "a dictionary": (
        Two(),
        lambda m, b: F.cross_entropy(m(b["x"], b["z"]), b["label"]),
        (X, X.flip(0), labels(X)),
        ("x", "z", "label"),
        {"x": X[:4], "z": X.flip(0)[:4]},
        lambda f: f.softmax(-1),
    ),
    "logits in a dictionary": (
        Logits(),
        lambda m, b: F.cross_entropy(m(b[0])["logits"], b[1]),
        (X, labels(X)),
        (),
        X[:4],
        lambda f: f["logits"].softmax(-1),
    ),
}


def by_hand(net, posterior, x, mean):
    """The average over samples of what outputs mean."""
    args = x if isinstance(x, tuple) else (x,)
    args, kwargs = ((), x) if isinstance(x, dict) else (args, {})
    drawn = PosteriorSamples(posterior, SAMPLES, 0)
    weights = [{name.removeprefix("net."): value for name, value in drawn.weights(k).items()} for k in range(SAMPLES)]
    return torch.stack([mean(torch.func.functional_call(net, each, args, kwargs)) for each in weights]).mean(0).detach()


@pytest.mark.parametrize("callback", [VOGNCallback, lambda: SWAGCallback(start=0.0)], ids=["VOGN", "SWAG"])
@pytest.mark.parametrize("name", CASES)
def test_predictions_after_the_fit_are_averages_of_what_the_loss_says(name, callback, tmp_path):
    net, step, columns, names, x, mean = CASES[name]
    trainer = tiny_training.fit(
        Net(net, step), callback(), data=DataLoader(Batches(*columns, names=names), 16), max_epochs=2
    )
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    posterior = load_posterior(tmp_path / "last.ckpt")
    expected = by_hand(net, posterior, x, mean)
    found = mc_predict(Net(net), posterior, x, SAMPLES)
    torch.testing.assert_close(found.probs if hasattr(found, "probs") else found.mean, expected)
    zoo.save_posterior(tmp_path / "net.safetensors", net, posterior.select("net."))
    served = Predictor.load(tmp_path / "net.safetensors", model=copy.deepcopy(net), samples=SAMPLES)(x)
    torch.testing.assert_close(served.probs if hasattr(served, "probs") else served.mean, expected)


def test_a_regression_is_exported_as_one(tmp_path):
    net, step, columns, _, x, mean = CASES["regression near 100"]
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=DataLoader(Batches(*columns), 16))
    posterior = trainer.callbacks[0].optimizer.posterior().select("net.")
    file = export(net, posterior, tmp_path / "net.pt2", x, SAMPLES)
    assert file.outputs == ("mean", "variance")
    found = torch.export.load(file.path).module()(x)[0]
    torch.testing.assert_close(found, by_hand(net, posterior, x, mean))


def test_a_plain_training_loop_carries_the_likelihood_too():
    from lightning_bayes import VOGN

    net = nn.Linear(3, 6)
    optimizer = VOGN(net, lr=0.01, num_data=32)
    for _ in range(2):
        with optimizer.sampled_params():
            F.cross_entropy(net(TOKENS).flatten(0, 1), labels(TOKENS).flatten()).backward()
        optimizer.step()
    found = mc_predict(net, optimizer.posterior(), TOKENS[:2], SAMPLES)
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(2, 5))


def test_a_stated_link_completes_the_record_or_contradicts_it():
    net, step, columns, _, x, _ = CASES["tokens"]
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=DataLoader(Batches(*columns), 16))
    posterior = trainer.callbacks[0].optimizer.posterior()
    found = mc_predict(Net(net), posterior, x, SAMPLES, link="classification")
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(4, 5))
    with pytest.raises(HyperparameterError, match=r"Gaussian\(\) contradicts .* Categorical\(dim=-1"):
        mc_predict(Net(net), posterior, x, SAMPLES, link="regression")


def test_where_nothing_is_known_raw_outputs_are_averaged_and_it_is_said():
    net, step, columns, _, x, _ = CASES["tokens"]
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=DataLoader(Batches(*columns), 16))
    posterior = trainer.callbacks[0].optimizer.posterior().with_likelihood(None)
    with pytest.warns(UserWarning, match="does not tell how outputs become predictions"):
        found = mc_predict(Net(net), posterior, x, SAMPLES)
    assert found.mean.shape == (4, 5, 6)
    with pytest.warns(UserWarning, match="does not tell"):
        calibrate(Net(net), posterior, [(TOKENS, TOKENS[..., :1].expand(-1, -1, 6))], SAMPLES)


def test_checkpoints_from_before_the_likelihood_load_with_their_link(tmp_path):
    net, step, columns, _, x, _ = CASES["tokens"]
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=DataLoader(Batches(*columns), 16))
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    checkpoint = torch.load(tmp_path / "now.ckpt", weights_only=True)
    for state in checkpoint["callbacks"].values():
        if state.pop("likelihood", None) is not None:
            state["link"] = "softmax_last"
    torch.save(checkpoint, tmp_path / "then.ckpt")
    found = mc_predict(Net(net), load_posterior(tmp_path / "then.ckpt"), x, SAMPLES)
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(4, 5))


def test_the_value_in_a_checkpoint_is_plain_data(tmp_path):
    net, step, columns, names, _, _ = CASES["a dictionary"]
    data = DataLoader(Batches(*columns, names=names), 16)
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"].values()
    (state,) = (state["likelihood"] for state in states if "likelihood" in state)
    likelihood = Likelihood.of_state(state)
    assert likelihood.outputs[0].targets.path == ("label",)
    assert likelihood.inputs.args == (("path", ("x",)), ("path", ("z",)))


class OnPairs(nn.Module):
    """A network of two inputs as one of a stack of both."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x[:, 0], x[:, 1])


def test_calibrate_passes_what_the_step_passed():
    net, step, columns, names, _, _ = CASES["a dictionary"]
    data = DataLoader(Batches(*columns, names=names), 16)
    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=data)
    posterior = trainer.callbacks[0].optimizer.posterior()
    found = calibrate(Net(net), posterior, data, SAMPLES)
    x, z, y = columns
    pairs = [(torch.stack([x, z], 1), y)]
    wanted = calibrate(
        OnPairs(copy.deepcopy(net)), posterior, pairs, SAMPLES, link=posterior.likelihood.outputs[0].kind
    )
    assert found.calibration.nll == pytest.approx(wanted.calibration.nll, rel=1e-5)
    assert found.posterior.temperature == pytest.approx(wanted.posterior.temperature, rel=1e-3)


@pytest.mark.parametrize("void", [255, -1])
def test_calibrate_leaves_out_what_the_loss_ignores(void):
    net = nn.Linear(3, 2)
    y = labels(TOKENS)
    y[:, 3:] = void

    def step(module, batch):
        return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=void)

    trainer = tiny_training.fit(Net(net, step), VOGNCallback(), data=DataLoader(Batches(TOKENS, y), 16))
    posterior = trainer.callbacks[0].optimizer.posterior()
    found = calibrate(Net(net), posterior, [(TOKENS, y)], SAMPLES)
    rows = [(TOKENS[:, :3], y[:, :3])]  # all tokens of a sequence count as one example, as they do without ignored ones
    wanted = calibrate(Net(net), posterior.with_likelihood(None), rows, SAMPLES, link="softmax_last")
    assert found.calibration.nll == pytest.approx(wanted.calibration.nll, rel=1e-5)
