"""Deep ensembles of checkpoints, against members loaded and averaged by hand."""

from __future__ import annotations

import csv
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from tiny_training import RecordingClassifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import DeepEnsembleCallback, VOGNCallback
from lightning_bayes.callbacks import deep_ensemble
from lightning_bayes.callbacks.ensembles.member_fits import layers_to_reset
from lightning_bayes.cli.commands import main
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedLayerError
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.zoo import BayesClassifier, DigitsDataModule, LeNet5

# One module serves fit, validate and test; most fits here validate nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def network(hidden=6):
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3))


class Net(RecordingClassifier):
    def __init__(self, hidden=6, loss=F.cross_entropy) -> None:
        super().__init__(net=network(hidden), loss=loss)


def first_output(output, y):
    return F.mse_loss(output[:, 0], y.float())


def member(path, seed=0, loss=F.cross_entropy, callbacks=()):
    torch.manual_seed(seed)
    module = Net(loss=loss)
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
    modules = [member(path, seed, first_output, [VOGNCallback()]) for seed, path in enumerate(paths)]
    found, _ = evaluated(Net(loss=first_output), DeepEnsembleCallback(paths))
    with torch.no_grad():
        expected = torch.stack([module.net(blobs().tensors[0]) for module in modules]).mean(0)
    torch.testing.assert_close(found, expected)


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


# -- members that the callback trains --------------------------------------------------------------------------------------


class Scheduled(Net):
    """A network whose optimizer and schedule show in its weights, and which says what a fit was."""

    fits: ClassVar[list] = []  # of all instances, copies included

    def on_train_end(self):
        type(self).fits.append((self.trainer.global_step, self.trainer.gradient_clip_val, weights(self)))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.fixture
def scheduled():
    Scheduled.fits = []
    torch.manual_seed(7)
    return Scheduled()


TRAINING = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def trained_here(module, tmp_path, count=3, **options):
    callback = DeepEnsembleCallback(count, seed=5)
    trainer = quiet_trainer(callback, default_root_dir=tmp_path, **TRAINING)
    trainer.fit(module, loader(), loader(), **options)
    return callback, trainer, [Path(callback.folder) / f"member_{k + 1}.ckpt" for k in range(count)]


def by_plain_lightning(seed):
    """The weights of a member by hand: draw the initial weights, layer by layer from the end, and fit."""
    module = Scheduled()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in reversed(module.net):
            if not isinstance(layer, nn.Tanh):
                layer.reset_parameters()
        quiet_trainer(num_sanity_val_steps=0, **TRAINING).fit(module, loader(), loader())
    return weights(module)


def test_members_are_plain_fits_from_weights_drawn_under_seeds_of_their_own(scheduled, tmp_path):
    start = weights(scheduled)
    _, trainer, paths = trained_here(scheduled, tmp_path)
    found = [read_checkpoint(path)["state_dict"] for path in paths]
    alone = Scheduled()
    alone.load_state_dict(start)
    quiet_trainer(**TRAINING).fit(alone, loader(), loader())
    for member, expected in zip(found, [weights(alone), by_plain_lightning(6), by_plain_lightning(7)], strict=True):
        assert_same_bits(member, expected)
    assert_same_bits(weights(scheduled), weights(alone))
    assert [fit[:2] for fit in Scheduled.fits[:3]] == [(6, 0.5)] * 3
    assert scheduled.trainer is trainer


def test_a_test_and_a_prediction_average_the_trained_members(scheduled, tmp_path):
    callback, trainer, paths = trained_here(scheduled, tmp_path)
    modules = [Scheduled() for _ in paths]
    for module, path in zip(modules, paths, strict=True):
        module.load_state_dict(read_checkpoint(path)["state_dict"])
        module.eval()
    scheduled.seen = []
    trainer.test(scheduled, loader(), verbose=False)
    probs = by_hand(modules).mean(0)
    torch.testing.assert_close(torch.cat(scheduled.seen).softmax(-1), probs)
    found = torch.cat([p["probs"] for p in trainer.predict(scheduled, loader())])
    torch.testing.assert_close(found, probs)

    trainer.save_checkpoint(tmp_path / "run.ckpt")  # another process finds link and members through the checkpoint
    other, later = Scheduled(), quiet_trainer(DeepEnsembleCallback(3))
    later.test(other, loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    torch.testing.assert_close(torch.cat(other.seen).softmax(-1), probs)
    assert callback.members == []


def test_a_resumed_fit_trains_only_the_members_that_are_missing(scheduled, tmp_path):
    _, trainer, paths = trained_here(scheduled, tmp_path)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    before = [weights_of(path) for path in paths]
    paths[2].unlink()
    Scheduled.fits = []
    trained_here(Scheduled(), tmp_path, ckpt_path=tmp_path / "run.ckpt")
    assert len(Scheduled.fits) == 1
    for path, expected in zip(paths, before, strict=True):
        assert_same_bits(weights_of(path), expected)


def test_a_new_fit_trains_all_members_anew(scheduled, tmp_path):
    trained_here(scheduled, tmp_path, 2)
    Scheduled.fits = []
    trained_here(Scheduled(), tmp_path, 2)
    assert len(Scheduled.fits) == 2


def weights_of(path):
    return read_checkpoint(path)["state_dict"]


def test_the_cost_and_the_callbacks_that_are_copied_are_said(scheduled, tmp_path, caplog):
    trainer = quiet_trainer(DeepEnsembleCallback(2), EarlyStopping("val_loss"), default_root_dir=tmp_path)
    caplog.set_level("INFO")
    trainer.fit(scheduled, loader(), loader())
    assert "Each trains with its own copies of EarlyStopping, and without a logger." in caplog.text
    assert "trains 2 networks one after the other, which takes about 2 times as long as one" in caplog.text


def test_layers_that_are_frozen_keep_their_weights():
    net = network()
    net[0].requires_grad_(False)
    before = weights(net)
    for reset in layers_to_reset(net):
        reset()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[3].weight, before["3.weight"])


def test_a_parameter_of_no_layer_that_starts_from_a_constant_starts_there_again(tmp_path):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 0.5))

    module = Scaled()
    for reset in layers_to_reset(module):
        reset()
    assert module.scale.tolist() == [0.5] * 3
    fit(module, DeepEnsembleCallback(2), default_root_dir=tmp_path)


def test_a_parameter_that_cannot_be_drawn_anew_is_named_before_the_fit(tmp_path):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.arange(2.0))

    module = Scaled()
    with pytest.raises(
        UnsupportedLayerError, match=r"Scaled cannot start again .* no layer .* draws scale\. Define it, or"
    ):
        fit(module, DeepEnsembleCallback(2), default_root_dir=tmp_path)
    assert module.training_steps == 0


@pytest.mark.parametrize("members", [0, 1, -2, 1.5])
def test_a_number_of_members_is_at_least_two(members):
    with pytest.raises(
        HyperparameterError, match=rf"members={members} must be a whole number .* at least 2, such as 5, or"
    ):
        DeepEnsembleCallback(members)


def test_samples_of_members_need_posteriors():
    with pytest.raises(HyperparameterError, match=r"samples=3 needs members with posteriors, .*Pass samples=0, or"):
        DeepEnsembleCallback(2, samples=3)


def test_a_test_before_any_fit_says_what_to_pass():
    with pytest.raises(PosteriorError, match=r"members=2 has trained no networks\. Fit first, or pass ckpt_path"):
        evaluated(Net(), DeepEnsembleCallback(2))


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
    (tmp_path / "broken.ckpt").write_bytes(b"nonsense")
    with pytest.raises(PosteriorError, match=r"broken\.ckpt cannot be read as a checkpoint"):
        evaluated(Net(), DeepEnsembleCallback([*members[0], tmp_path / "broken.ckpt"]))
    with pytest.raises(
        FileNotFoundError, match=r"missing\.ckpt does not exist. Pass the paths .* the number of networks"
    ):
        DeepEnsembleCallback([*members[0], tmp_path / "missing.ckpt"])


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
