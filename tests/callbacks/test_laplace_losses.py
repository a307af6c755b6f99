"""`LaplaceCallback` on modules whose steps mask, weight, select or change targets, against Jacobians of the loss itself."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from tiny_training import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import LaplaceCallback
from lightning_bayes.errors import UnsupportedTrainingError

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")
N, T, C = 24, 4, 3
GENERATOR = torch.Generator().manual_seed(0)
X, TOKENS, EXTRA = (torch.randn(*shape, generator=GENERATOR) for shape in ((N, 5), (N, T, 5), (N, 2)))
CLASSES, OF_TOKENS = torch.arange(N) % C, torch.randint(C, (N, T), generator=GENERATOR)
SELECTED = torch.rand(N, T, generator=GENERATOR) < 0.5
VALUES = torch.randn(N, 2, generator=GENERATOR)
IMPORTANCE = 0.5 + torch.rand(N, generator=GENERATOR)
WEIGHT = torch.tensor([0.5, 2.0, 7.0])


class Rows(Dataset):
    """Batches of tuples or dictionaries."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(next(iter(self.data.values() if isinstance(self.data, dict) else self.data)))

    def __getitem__(self, index):
        if isinstance(self.data, dict):
            return {name: value[index] for name, value in self.data.items()}
        return tuple(value[index] for value in self.data)


class Module(LightningModule):
    """A linear head on tanh features; a case states forward and the step."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.case, self.body, self.head = case, nn.Linear(5, 6), nn.Linear(6, case.columns)
        self.steps = 0

    def forward(self, *args, **kwargs):
        return self.case.forward(self, *args, **kwargs)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        loss = self.case.step(self, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def plain(self, x):
    return self.head(self.body(x).tanh())


class Case(NamedTuple):
    """A module's step on its data, and the loss summed over all examples, of outputs ``[N, …]`` of `plain`.

    Losses that are means are multiplied by the number of their targets.
    """

    data: Any
    columns: int
    step: Any
    summed: Any
    forward: Any = plain
    inputs: Any = X


def missing_mean(f, y):
    seen = ~y.isnan()
    return ((f - y.nan_to_num()).square() * seen).sum() / seen.sum()


CASES = {
    "a void class": Case(
        (TOKENS, torch.where(SELECTED, OF_TOKENS, 255)),
        C,
        lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1], ignore_index=255),
        lambda f: F.cross_entropy(f[SELECTED], OF_TOKENS[SELECTED], reduction="sum"),
        inputs=TOKENS,
    ),
    "selected tokens": Case(
        (TOKENS, OF_TOKENS, SELECTED),
        C,
        lambda m, b: F.cross_entropy(m(b[0])[b[2]], b[1][b[2]]),
        lambda f: F.cross_entropy(f[SELECTED], OF_TOKENS[SELECTED], reduction="sum"),
        inputs=TOKENS,
    ),
    "flattened tokens of a dictionary": Case(
        {"x": TOKENS, "labels": torch.where(SELECTED, OF_TOKENS, -100)},
        C,
        lambda m, b: F.cross_entropy(m(x=b["x"])["logits"].flatten(0, 1), b["labels"].flatten()),
        lambda f: F.cross_entropy(f[SELECTED], OF_TOKENS[SELECTED], reduction="sum"),
        lambda m, x: {"logits": plain(m, x), "features": x},
        TOKENS,
    ),
    "class weights": Case(
        (X, CLASSES),
        C,
        lambda m, b: F.cross_entropy(m(b[0]), b[1], WEIGHT),
        lambda f: N * F.cross_entropy(f, CLASSES, WEIGHT.to(f)),
    ),
    **{
        f"class weights, {name}": Case(
            (X, CLASSES), C, step, lambda f: F.cross_entropy(f, CLASSES, WEIGHT.to(f), reduction="sum")
        )
        for name, step in {
            "summed": lambda m, b: F.cross_entropy(m(b[0]), b[1], WEIGHT, reduction="sum"),
            "averaged by hand": lambda m, b: F.cross_entropy(m(b[0]), b[1], WEIGHT, reduction="none").mean(),
        }.items()
    },
    "label smoothing": Case(
        (X, CLASSES),
        C,
        lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.2),
        lambda f: F.cross_entropy(f, CLASSES, label_smoothing=0.2, reduction="sum"),
    ),
    "pos_weight": Case(
        (X, (VALUES > 0).float()),
        2,
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1], pos_weight=WEIGHT[1:]),
        lambda f: F.binary_cross_entropy_with_logits(f, (VALUES > 0).float(), pos_weight=WEIGHT[1:], reduction="sum"),
    ),
    "two inputs": Case(
        (X, EXTRA, CLASSES),
        C,
        lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
        lambda f: F.cross_entropy(f, CLASSES, reduction="sum"),
        lambda m, x, z=EXTRA: plain(m, torch.cat([x[:, :3], z], 1)),
    ),
    "example weights": Case(
        (X, CLASSES, IMPORTANCE),
        C,
        lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2]).mean(),
        lambda f: (F.cross_entropy(f, CLASSES, reduction="none") * IMPORTANCE / IMPORTANCE.mean()).sum(),
    ),
    "counts": Case(
        (X, VALUES.abs().round()),
        2,
        lambda m, b: F.poisson_nll_loss(m(b[0]), b[1]),
        lambda f: F.poisson_nll_loss(f, VALUES.abs().round(), reduction="sum"),
    ),
}


def curvature_of(case, module):
    """Σ_i Jᵀ H J of the head by autograd, in the order of its parameters."""
    module = module.eval()
    inputs = module.body(_inputs(case)).tanh().detach().double()
    weight, bias = module.head.weight.detach().double(), module.head.bias.detach().double()

    def loss(flat):
        w, b = flat[: weight.numel()].view_as(weight), flat[weight.numel() :]
        return case.summed(inputs @ w.T + b)

    return torch.autograd.functional.hessian(loss, torch.cat([weight.flatten(), bias]))


def _inputs(case):
    return torch.cat([X[:, :3], EXTRA], 1) if case is CASES["two inputs"] else case.inputs


def fitted(case, **arguments):
    callback = LaplaceCallback("full", prior_precision=1.0, **arguments)
    module = Module(case)
    quiet_trainer(callback, max_epochs=2).fit(module, DataLoader(Rows(case.data), batch_size=N))
    return module, callback


@pytest.mark.parametrize("name", CASES)
def test_the_curvature_of_a_linear_head_is_the_hessian_of_its_loss(name):
    """For losses that are convex in the outputs with a curvature that no label changes, both are equal."""
    module, callback = fitted(CASES[name])
    found = callback.posterior.precision - torch.eye(len(callback.posterior.precision))
    torch.testing.assert_close(found.double(), curvature_of(CASES[name], module), rtol=1e-4, atol=1e-5)


def test_the_step_is_run_without_a_trace():
    case = CASES["selected tokens"]
    one, _ = fitted(case)
    other = Module(case)
    quiet_trainer(max_epochs=2).fit(other, DataLoader(Rows(case.data), batch_size=N))
    assert one.steps == other.steps
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_regression_with_missing_targets_fits_one_noise_each():
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(300, 5, generator=generator), torch.randn(300, 2, generator=generator)
    y = torch.stack([x[:, 0] + 0.1 * noise[:, 0], x[:, 1] + 2 * noise[:, 1]], 1)
    y[::3, 0] = math.nan
    case = Case((x, y), 2, lambda m, b: missing_mean(m(b[0]), b[1]), None)
    callback, module = LaplaceCallback("full", likelihood="regression"), Module(case)
    trainer = quiet_trainer(callback, max_epochs=40)
    trainer.fit(module, DataLoader(Rows(case.data), batch_size=20))
    narrow, broad = callback.result.likelihood.std
    assert narrow < 0.4
    assert broad == pytest.approx(2, rel=0.15)
    prediction = trainer.predict(module, DataLoader(X, batch_size=N))[0]
    torch.testing.assert_close(prediction["aleatoric"][0].sqrt(), torch.tensor([narrow, broad]))


@pytest.mark.parametrize("form", ["log_variance", "softplus_variance"])
def test_networks_that_predict_their_noise(form):
    variance = {"log_variance": torch.exp, "softplus_variance": F.softplus}[form]

    def step(module, batch):
        mean, second = module(batch[0])
        return F.gaussian_nll_loss(mean, batch[1], variance(second))

    case = Case((X, VALUES), 4, step, None, lambda m, x: plain(m, x).chunk(2, 1))
    module, callback = fitted(case)
    features = torch.cat([module.eval().body(X).tanh(), torch.ones(N, 1)], 1).detach().double()
    outputs = plain(module, X).detach().double()
    slope = torch.autograd.functional.jacobian(lambda s: variance(s).sum(), outputs[:, 2:])
    v = variance(outputs[:, 2:])
    fisher = torch.cat([1 / v, slope.square() / (2 * v.square())], 1)  # of N(μ, v): 1/v and v'²/(2 v²)
    blocks = [torch.einsum("n,np,nq->pq", fisher[:, k], features, features) for k in range(4)]
    expected = torch.block_diag(*blocks)  # weights and bias of each output
    order = [k * 7 + j for k in range(4) for j in range(6)] + [k * 7 + 6 for k in range(4)]
    found = callback.posterior.precision.double() - torch.eye(28)
    torch.testing.assert_close(found, expected[order][:, order], rtol=1e-4, atol=1e-5)


def test_targets_that_the_step_changes_are_those_of_the_loss():
    case = Case((X, 100 + 7 * VALUES), 2, lambda m, b: F.mse_loss(m(b[0]), (b[1] - 100) / 7), None)
    module, callback = fitted(case)
    residuals = (plain(module.eval(), X) - VALUES).square().mean(0).sqrt().tolist()
    torch.testing.assert_close(torch.tensor(callback.result.likelihood.std), torch.tensor(residuals), rtol=0.3, atol=0)


def test_a_checkpoint_alone_gets_its_likelihood_from_the_training_step(tmp_path):
    case = CASES["a void class"]
    module = Module(case)
    trainer = quiet_trainer(max_epochs=60)
    trainer.fit(module, DataLoader(Rows(case.data), batch_size=N))
    trainer.save_checkpoint(tmp_path / "adam.ckpt")
    other = Module(case)
    other.train_dataloader = lambda: DataLoader(Rows(case.data), batch_size=N)
    callback = LaplaceCallback("full", prior_precision=1.0)
    quiet_trainer(callback).predict(other, DataLoader(TOKENS, batch_size=N), ckpt_path=tmp_path / "adam.ckpt")
    found = callback.posterior.precision - torch.eye(len(callback.posterior.precision))
    torch.testing.assert_close(found.double(), curvature_of(case, module), rtol=1e-4, atol=1e-5)


def of_checkpoint(module, case, likelihood):
    """The curvature that is computed before a prediction, by a callback that has seen no fit."""
    module.train_dataloader = lambda: DataLoader(Rows(case.data), batch_size=N)
    callback = LaplaceCallback("full", prior_precision=1.0, likelihood=likelihood)
    quiet_trainer(callback).predict(module, DataLoader(X, batch_size=N))
    return (callback.posterior.precision - torch.eye(len(callback.posterior.precision))).double()


def test_a_stated_likelihood_is_completed_by_the_step_of_a_checkpoint():
    case = CASES["class weights"]
    module = Module(case)
    quiet_trainer(max_epochs=60).fit(module, DataLoader(Rows(case.data), batch_size=N))
    torch.testing.assert_close(
        of_checkpoint(module, case, "classification"), curvature_of(case, module), rtol=1e-4, atol=1e-5
    )


class Manual(Module):
    """Its training step cannot be run beside a fit."""

    def __init__(self, case):
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.case.step(self, batch))
        optimizer.step()


def test_a_step_that_cannot_be_run_leaves_pairs_to_a_stated_likelihood():
    case = CASES["label smoothing"]._replace(summed=lambda f: F.cross_entropy(f, CLASSES, reduction="sum"))
    module = Manual(case)
    quiet_trainer(max_epochs=60).fit(module, DataLoader(Rows(case.data), batch_size=N))
    torch.testing.assert_close(
        of_checkpoint(module, case, "classification"), curvature_of(case, module), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(UnsupportedTrainingError, match="with manual optimization"):
        of_checkpoint(module, case, None)


def focal(module, batch):
    values = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
    return ((1 - (-values).exp()).square() * values).mean()


def test_a_focal_loss_is_refused_by_name():
    case = Case((X, CLASSES), C, focal, None)
    with pytest.raises(UnsupportedTrainingError, match=r"as a focal loss does.*Pass likelihood='categorical'"):
        fitted(case)
    _, callback = fitted(case, likelihood="classification")
    plain_case = CASES["class weights"]._replace(summed=lambda f: F.cross_entropy(f, CLASSES, reduction="sum"))
    found = callback.posterior.precision - torch.eye(len(callback.posterior.precision))
    module = Module(case)
    module.load_state_dict({**module.state_dict(), **callback.posterior.constants, **callback.posterior.mean})
    torch.testing.assert_close(found.double(), curvature_of(plain_case, module), rtol=1e-4, atol=1e-5)


def test_two_heads_have_the_sum_of_their_curvatures():
    def step(module, batch):
        logits, values = module(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * F.mse_loss(values, batch[2])

    def summed(f):
        squares = (f[:, C:] - VALUES).square()
        variance = squares.mean(0).detach()  # of the residuals
        return F.cross_entropy(f[:, :C], CLASSES, reduction="sum") + (squares / (2 * variance)).sum()

    case = Case((X, CLASSES, VALUES), C + 2, step, summed, lambda m, x: plain(m, x).split([C, 2], 1))
    module, callback = fitted(case)
    found = callback.posterior.precision - torch.eye(len(callback.posterior.precision))
    torch.testing.assert_close(found.double(), curvature_of(case, module), rtol=1e-4, atol=1e-5)
    trainer = quiet_trainer(callback)
    prediction = trainer.predict(module, DataLoader(X, batch_size=N))[0]
    torch.testing.assert_close(prediction[0]["probs"].sum(1), torch.ones(N))
    assert (prediction[1]["epistemic"] > 0).all()
