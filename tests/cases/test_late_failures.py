"""What the end of a fit needs is tried at its start; an error at the end keeps the fit and its checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny_training import Classifier, ValidatedClassifier, assert_close, fit, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import Calibration, LaplaceCallback, SWAGCallback, VOGNCallback, laplace
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept
from lightning_bayes.errors import BayesError, DataError, UnsupportedTrainingError

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def loader(*tensors, batch_size=8):
    return DataLoader(TensorDataset(*(tensors or (X, Y))), batch_size)


class Net(ValidatedClassifier):
    def __init__(self, loss=F.cross_entropy, outputs=2):
        torch.manual_seed(0)
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), lr=0.01), nn.Linear(4, outputs), loss)


class OneLogit(Net):
    """Whole-number labels of a binary loss."""

    def __init__(self):
        super().__init__(lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs, targets.float()), 1)

    def forward(self, x):
        return self.net(x)[:, 0]


def without_likelihood(outputs, targets):
    return (outputs[:, 0] - targets).abs().pow(1.5).mean()


def quantile(outputs, targets):
    error = targets[:, None] - outputs
    return torch.maximum(0.1 * error, -0.9 * error).mean()


def masked(outputs, targets):
    known = targets.isfinite()
    return F.mse_loss(outputs[known], targets[known])


class Three(Net):
    """Batches of three tensors."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], batch[2]), batch_idx)

    def validation_step(self, batch, batch_idx):
        self(batch[0])


def test_whole_number_labels_of_a_binary_loss_are_measured():
    module, callback = OneLogit(), LaplaceCallback()
    fit(module, callback, data=loader(), max_epochs=2)
    assert callback.posterior is not None


@pytest.mark.parametrize(("module", "data"), [(Net(without_likelihood, 1), (X, Y)), (Net(quantile), (X, Y.float()))])
def test_laplace_refuses_after_the_first_batch(module, data):
    with pytest.raises(BayesError):
        fit(module, LaplaceCallback(), data=loader(*data), max_epochs=50)
    assert module.training_steps == 1


def test_infinite_targets_are_counted():
    late = X[:, :2].clone()
    late[9] = math.inf
    with pytest.raises(DataError, match="2 of the 16 targets of a batch are infinite"):
        laplace(nn.Linear(4, 2), loader(X, late), "regression", "diagonal", "all")


def test_a_temperature_of_batches_of_three_is_chosen_as_the_step_reads_them():
    module, calibration = Three(), Calibration()
    quiet_trainer(VOGNCallback(), calibration, max_epochs=2).fit(module, loader(X, X, Y), loader(X, X, Y))
    assert calibration.scale is not None
    assert calibration.temperature != 1


def test_a_width_without_validation_data_is_refused_before_the_first_batch():
    module = Three()
    with pytest.raises(UnsupportedTrainingError, match=r"fits its width and temperature on a validation set"):
        quiet_trainer(VOGNCallback(), Calibration(), max_epochs=50).fit(module, loader(X, X, Y))
    assert module.training_steps == 0


class Tokens(Net):
    """Logits [batch, tokens, classes] of ids."""

    def __init__(self, loss=lambda outputs, targets: F.cross_entropy(outputs.flatten(0, -2), targets.flatten())):
        super().__init__(loss)
        self.net = nn.Sequential(nn.Embedding(2, 5), nn.Linear(5, 3))

    def forward(self, x):
        return self.net((x > 0).long())


class Transposed(Tokens):
    """Logits [batch, classes, tokens], as segmentation has them, which are not contiguous."""

    def __init__(self, contiguous=False):
        super().__init__(F.cross_entropy)
        self.contiguous = contiguous

    def forward(self, x):
        outputs = super().forward(x).transpose(1, 2)
        return outputs.contiguous() if self.contiguous else outputs


def counts():
    return Net(lambda outputs, targets: F.poisson_nll_loss(outputs, targets.float()))


LABELS = (X > 0).long() + (X > 1).long()


@pytest.mark.parametrize(
    ("module", "targets"),
    [(Tokens, LABELS), (Transposed, LABELS), (counts, F.one_hot(Y, 2))],
    ids=["tokens", "transposed", "counts"],
)
def test_the_width_of_tokens_and_counts_is_found(module, targets):
    trainer = quiet_trainer(VOGNCallback(calibrate=True), max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module(), loader(X, targets), loader(X, targets))
    assert "val/posterior_scale" in trainer.callback_metrics


def test_laplace_of_transposed_outputs_is_that_of_their_copy():
    found = []
    for contiguous in (False, True):
        module, callback = Transposed(contiguous), LaplaceCallback(subset="all", prior_precision=1.0)
        trainer = quiet_trainer(callback, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(module, loader(X, LABELS), loader(X, LABELS))
        found.append(torch.cat([batch["probs"] for batch in trainer.predict(module, loader(X, LABELS))]))
    torch.testing.assert_close(*found)


SOME = torch.arange(32) % 8 > 1
VALUES = X[:, :2]
TAKEN = {
    "three tensors": (Three, (X, X, Y), (X, Y), "classification"),
    "unit": (
        lambda: Net(lambda f, y: F.mse_loss(f, (y - 100) / 20)),
        (X, 100 + 20 * VALUES),
        (X, VALUES),
        "regression",
    ),
    "first label": (lambda: Net(lambda f, y: F.cross_entropy(f, y - 1)), (X, Y + 1), (X, Y), "classification"),
    "masked": (
        lambda: Net(masked),
        (X, VALUES.where(SOME[:, None], math.nan)),
        (X[SOME], VALUES[SOME]),
        "regression",
    ),
    "tokens": (Tokens, (X, LABELS), (X.flatten(), LABELS.flatten()), "classification"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_laplace_takes_targets_as_the_step_does(name):
    build, data, plain, likelihood = TAKEN[name]
    module, callback = build(), LaplaceCallback("full")
    fit(module, callback, data=loader(*data), max_epochs=50)
    expected = laplace(module.eval(), loader(*plain), likelihood, "full")
    found = callback.result
    assert found.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood, rel=1e-4)
    assert_close(found.posterior.variance(), expected.posterior.variance(), rtol=1e-3, atol=0)


class BreaksAtTheEnd(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.forward = self.broken

    @staticmethod
    def broken(x):
        raise RuntimeError("no more memory")


@pytest.mark.parametrize("late", [LaplaceCallback, lambda: [VOGNCallback(), Calibration()]])
def test_an_error_at_the_end_keeps_the_checkpoint_and_says_so(late, tmp_path):
    callbacks = late()
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    trainer = quiet_trainer(
        BreaksAtTheEnd(),
        *callbacks,
        checkpoint,
        max_epochs=1,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    )
    module = Net()
    loaders = (loader(), loader())
    with pytest.warns(
        UserWarning, match=r"did not find a (posterior|width) at the end of the fit: .*checkpoints are kept"
    ):
        trainer.fit(module, *loaders)
    assert (tmp_path / "last.ckpt").exists()


def test_warnings_that_the_user_turns_into_errors_stay_errors():
    with pytest.raises(RuntimeWarning, match="at an edge"), fit_kept("LaplaceCallback", "a posterior"):
        raise RuntimeWarning("The search ended at an edge")


class StopsEarly(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_swag_that_ends_early_says_that_there_is_no_posterior():
    with pytest.warns(UserWarning, match=r"collected the weights \d times; it needs 2"):
        fit(Classifier(), StopsEarly(), SWAGCallback(start=0.5), max_epochs=10)
