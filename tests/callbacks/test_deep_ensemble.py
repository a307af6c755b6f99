"""Deep ensembles of checkpoints, against members loaded and averaged by hand."""

from __future__ import annotations

import csv
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import DeepEnsembleCallback, VOGNCallback
from lightning_bayes.callbacks import deep_ensemble
from lightning_bayes.cli import main
from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.zoo import BayesClassifier, DigitsDataModule, LeNet5

# One module serves fit, validate and test; most fits here validate nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def network(hidden=6):
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3))


class Net(Classifier):
    def __init__(self, hidden=6) -> None:
        super().__init__(net=network(hidden))
        self.seen = []

    def test_step(self, batch, batch_idx):
        self.seen.append(self(batch[0]))
        self.log("loss", F.cross_entropy(self.seen[-1], batch[1]))

    def validation_step(self, batch, batch_idx):
        self.test_step(batch, batch_idx)


class Regression(Net):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0])[:, 0], batch[1].float())


def member(path, seed=0, kind=Net, callbacks=()):
    torch.manual_seed(seed)
    module = kind()
    fit(module, *callbacks, max_epochs=2).save_checkpoint(path)
    return module.eval()


@pytest.fixture
def members(tmp_path):
    """Paths and modules of three members."""
    paths = [tmp_path / f"member{seed}.ckpt" for seed in range(3)]
    return paths, [member(path, seed) for seed, path in enumerate(paths)]


def evaluated(module, *callbacks):
    module.seen = []
    (result,) = quiet_trainer(*callbacks).test(module, loader(), verbose=False)
    return torch.cat(module.seen), result["loss"]


@torch.no_grad()
def by_hand(modules):
    return torch.stack([module.net(blobs().tensors[0]).softmax(-1) for module in modules])


def test_a_test_is_of_the_members_averaged_probability(members):
    paths, modules = members
    logits, loss = evaluated(Net(), DeepEnsembleCallback(paths, link="softmax"))
    probs = by_hand(modules).mean(0)
    torch.testing.assert_close(logits.softmax(-1), probs)
    assert loss == pytest.approx(F.nll_loss(probs.log(), blobs().tensors[1]).item(), rel=1e-5)


def test_an_ensemble_of_one_is_that_member(members):
    paths, modules = members
    torch.testing.assert_close(evaluated(Net(), DeepEnsembleCallback(paths[:1]))[0].softmax(-1), by_hand(modules)[0])


@pytest.mark.parametrize("samples", [0, 2])
def test_what_else_a_checkpoint_holds_is_let_go_before_the_next_is_read(samples, tmp_path, monkeypatch):
    paths, held = [tmp_path / f"{seed}.ckpt" for seed in range(3)], []
    for seed, path in enumerate(paths):
        member(path, seed, callbacks=[VOGNCallback()])

    def read(path):
        assert not any(reference() is not None for reference in held)
        checkpoint = {**read_checkpoint(path), "other": torch.zeros(1)}
        held.append(weakref.ref(checkpoint["other"]))
        return checkpoint

    monkeypatch.setattr(deep_ensemble, "read_checkpoint", read)
    evaluated(Net(), DeepEnsembleCallback(paths, samples=samples))
    assert len(held) == 3


def test_prediction_tells_how_much_the_members_disagree(members):
    paths, modules = members
    predictions = quiet_trainer(DeepEnsembleCallback([str(path) for path in paths], link="softmax")).predict(
        Net(), loader()
    )
    each = by_hand(modules)
    total = torch.distributions.Categorical(probs=each.mean(0)).entropy()
    found = torch.cat([p["mutual_information"] for p in predictions])
    torch.testing.assert_close(
        found, total - torch.distributions.Categorical(probs=each).entropy().mean(0), rtol=1e-3, atol=1e-6
    )
    assert found.max() > 0.01


def test_the_modules_own_weights_do_not_count_and_are_the_same_afterwards(members):
    paths, modules = members
    module = Net()
    before = weights(module)
    evaluated(module, DeepEnsembleCallback(paths))
    assert_same_bits(weights(module), before)
    assert "forward" not in vars(module)
    torch.testing.assert_close(
        evaluated(modules[0], DeepEnsembleCallback(paths)), evaluated(module, DeepEnsembleCallback(paths))
    )


def test_validation_during_a_fit_is_the_modules_own(members):
    runs = []
    for callbacks in ([], [DeepEnsembleCallback(members[0])]):
        torch.manual_seed(7)
        module = Net()
        quiet_trainer(*callbacks, num_sanity_val_steps=0).fit(module, loader(), loader())
        runs.append(torch.cat(module.seen))
    assert torch.equal(*runs)


def test_members_that_vogn_has_trained_count_with_their_means_and_links(tmp_path):
    paths = [tmp_path / f"{seed}.ckpt" for seed in range(2)]
    modules = [member(path, seed, Regression, [VOGNCallback()]) for seed, path in enumerate(paths)]
    found, _ = evaluated(Regression(), DeepEnsembleCallback(paths))
    with torch.no_grad():
        expected = torch.stack([module.net(blobs().tensors[0]) for module in modules]).mean(0)
    torch.testing.assert_close(found, expected)


@pytest.fixture
def _seed_variables(monkeypatch):
    """Lightning's environment variables are restored, because processes of later tests would read them."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")


@pytest.mark.usefixtures("_seed_variables")
def test_the_documented_commands_train_and_evaluate_an_ensemble(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = [f"--trainer.{option}=false" for option in ("enable_progress_bar", "enable_model_summary")]
    command = ["--config", "digits+lenet5+adam", "--trainer.accelerator=cpu", *quiet]
    for seed in ("0", "1"):
        argv = ["lightning-bayes", "fit", *command, "--seed_everything", seed, "--trainer.max_epochs=2"]
        monkeypatch.setattr("sys.argv", argv)
        main()
    paths = sorted(Path("runs/digits_lenet5_adam").glob("version_*/checkpoints/last.ckpt"))
    ensemble = ["--trainer.callbacks+=lightning_bayes.DeepEnsembleCallback"]
    ensemble += [f"--trainer.callbacks.members=[{','.join(map(str, paths))}]"]
    monkeypatch.setattr("sys.argv", ["lightning-bayes", "test", *command, *ensemble])
    main()  # without a warning about the missing ckpt_path: warnings are errors
    with Path("runs/digits_lenet5_adam/version_2/metrics.csv").open(newline="") as file:
        (found,) = csv.DictReader(file)

    module, data = BayesClassifier(LeNet5(image_size=8), num_classes=10), DigitsDataModule()
    data.setup("test")
    images, targets = data.test_set.tensors
    probs = torch.zeros(len(images), 10)
    for path in paths:
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        probs += module.eval()(images).softmax(-1).detach() / 2
    assert float(found["test/cls/NLL"]) == pytest.approx(F.nll_loss(probs.log(), targets).item(), rel=1e-4)
    assert not [name for name in found if name.startswith("test_mean/")]  # the module's own weights are untrained


# -- what cannot work -----------------------------------------------------------------------------------------------------


def test_a_member_of_another_architecture_is_named_with_all_that_differs(members, tmp_path):
    paths, _ = members
    other = Net(hidden=7)
    other.net.append(nn.Linear(3, 3))
    fit(other).save_checkpoint(tmp_path / "other.ckpt")
    match = (
        r"member .*other\.ckpt is not a Net of this architecture \(unknown to the model: net\.4\.bias, net\.4\.weight; "
        r"of another shape: net\.0\.bias, net\.0\.weight, net\.1\.bias, .*\)\. Build the module with the arguments"
    )
    with pytest.raises(PosteriorError, match=match):
        evaluated(Net(), DeepEnsembleCallback([*paths, tmp_path / "other.ckpt"]))


def test_a_file_that_is_no_checkpoint_is_named(members, tmp_path):
    broken, plain = tmp_path / "broken.ckpt", tmp_path / "plain.ckpt"
    broken.write_bytes(b"nonsense")
    torch.save({"weights": torch.zeros(1)}, plain)
    with pytest.raises(PosteriorError, match=r"broken\.ckpt cannot be read as a checkpoint"):
        evaluated(Net(), DeepEnsembleCallback([*members[0], broken]))
    with pytest.raises(PosteriorError, match=r"plain\.ckpt is not a Lightning checkpoint: it has no 'state_dict'"):
        evaluated(Net(), DeepEnsembleCallback([plain]))
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        evaluated(Net(), DeepEnsembleCallback([tmp_path / "missing.ckpt"]))


@pytest.mark.parametrize("members", [[], "last.ckpt"])
def test_members_must_be_a_list_with_at_least_one_path(members):
    with pytest.raises(HyperparameterError, match=r"members=.* must be a list of at least one checkpoint path"):
        DeepEnsembleCallback(members)


def test_steps_that_bypass_forward_are_warned_about(members):
    class Bypass(Net):
        def test_step(self, batch, batch_idx):
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    with pytest.warns(UserWarning, match=r"the module's current weights.*or remove DeepEnsembleCallback"):
        quiet_trainer(DeepEnsembleCallback(members[0])).test(Bypass(), loader(), verbose=False)
