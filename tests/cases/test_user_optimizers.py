"""Optimizers of torch, timm and users train and resume as in plain Lightning, bit for bit, or are refused by name."""

from __future__ import annotations

import logging

import pytest
import timm.optim
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny_training import (
    Classifier,
    ValidatedClassifier,
    assert_same_bits,
    fit,
    loader,
    mlp,
    quiet_trainer,
    two_groups,
    weights,
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGN, VOGNCallback, load_posterior
from lightning_bayes.errors import NoMeasurementError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.effective import effective


def without_noise():
    return VOGNCallback(relative_noise=1e-30)


class CountsInGroups(torch.optim.Optimizer):
    """Its steps shrink with a count in the parameter groups and a global count in the state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / (group["count"] + self.state["all"]["steps"]))


def of_torch(name, **options):
    return lambda params: getattr(torch.optim, name)(params, **{"lr": 0.01, **options})


def of_timm(name, **options):
    return lambda params: getattr(timm.optim, name)(params, **{"lr": 0.01, **options})


TORCH = ("Adam", "AdamW", "Adagrad", "Adamax", "Adadelta", "RMSprop", "NAdam", "RAdam", "Adafactor")
TIMM = ("Adan", "Lamb", "Lars", "Lion", "Mars", "MADGRAD", "NAdamW")
OPTIMIZERS = {
    **{name: of_torch(name, weight_decay=0.1) for name in TORCH if hasattr(torch.optim, name)},
    **{f"timm {name}": of_timm(name, weight_decay=0.1) for name in TIMM if hasattr(timm.optim, name)},
    "SGD": of_torch("SGD", lr=1e-3, momentum=0.9, nesterov=True),
    "Rprop": of_torch("Rprop"),
    "Lookahead": lambda params: timm.optim.Lookahead(torch.optim.Adam(params, 0.01), k=4),
    "counts in groups": CountsInGroups,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.01)


def configured(build, net=None):
    return Classifier(lambda m: build(list(m.parameters())), net=net)


def trained(module, *callbacks, **options):
    fit(module, *callbacks, **{"max_epochs": 2, **options})
    return weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_without_noise_training_and_resuming_are_plain_lightnings(build, tmp_path):
    runs = []
    for name, ours in (("plain", []), ("ours", [without_noise()])):
        saving = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1)
        runs.append(trained(configured(build), *ours, saving, enable_checkpointing=True))
        resumed = configured(build, mlp(seed=5))
        quiet_trainer(*ours, max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / name / "epoch=0.ckpt")
        runs.append(weights(resumed))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_noisy_run_resumes_bit_for_bit(tmp_path):
    """With the state of another package's optimizer, the noise and the posterior."""
    build, callback = OPTIMIZERS["timm Adan"], VOGNCallback()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = trained(configured(build), callback, saving, enable_checkpointing=True)
    module, resumed = configured(build, mlp(seed=5)), VOGNCallback()
    quiet_trainer(resumed, max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same_bits(weights(module), whole)
    assert_same_bits(resumed.optimizer.posterior().precision, callback.optimizer.posterior().precision)


def plateau(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("options", "configure"),
    [
        ({}, plateau),
        ({"gradient_clip_val": 0.1}, plateau),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, plateau),
        ({"accumulate_grad_batches": 3}, plateau),
    ],
    ids=["plateau", "clipped norm", "clipped values", "accumulation"],
)
def test_the_trainers_options_act_as_in_plain_lightning(options, configure):
    found = []
    for ours in ([], [without_noise()]):
        module = ValidatedClassifier(configure)
        trainer = quiet_trainer(*ours, max_epochs=4, num_sanity_val_steps=0, **options)
        trainer.fit(module, loader(), loader())
        rates = torch.tensor([group["lr"] for group in trainer.optimizers[0].param_groups])
        found.append({**weights(module), "lr": rates})
    if "accumulate_grad_batches" in options:  # passes are averaged by examples, which rounds in another order
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)
    else:
        assert_same_bits(found[1], found[0])
    assert found[1]["lr"] < 0.01


class Unfreezes(BaseFinetuning):
    """Trains the last layer, and from the second epoch the first one with a tenth of its rate."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class AddsGroup(Classifier):
    """Adds a group to the optimizer of the trainer, or to its own, in the second epoch."""

    def __init__(self, adds_to_own):
        super().__init__()
        self.adds_to_own = adds_to_own

    def configure_optimizers(self):
        self.own = torch.optim.Adam(self.net[2].parameters(), 0.01)
        return self.own

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            optimizer = self.own if self.adds_to_own else self.optimizers().optimizer
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.02})


def trainable(module):
    return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (lambda: Classifier(trainable), [Unfreezes]),
        (lambda: AddsGroup(adds_to_own=False), []),
        (lambda: AddsGroup(adds_to_own=True), []),
    ],
    ids=["finetuning", "the trainer's", "its own"],
)
def test_groups_are_added_as_in_plain_lightning(make, callbacks):
    plain, ours, noisy = make(), make(), without_noise()
    trained(plain, *(new() for new in callbacks), max_epochs=3)
    trained(ours, *(new() for new in callbacks), noisy, max_epochs=3)
    assert_same_bits(weights(ours), weights(plain))
    assert noisy.optimizer.posterior().mean.keys() == weights(plain).keys()


def test_a_gradient_scaler_scales_as_in_plain_pytorch():
    """The callbacks' host for 16-mixed is a GPU, so this is the scaler alone."""
    net, twin = mlp(), mlp()
    plain, base = torch.optim.Adam(net.parameters(), 0.01), torch.optim.Adam(twin.parameters(), 0.01)
    noisy = VOGN(twin, base=base, num_data=48, relative_noise=1e-30)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for x, y in loader():
        plain.zero_grad()
        scalers[0].scale(nn.functional.cross_entropy(net(x), y)).backward()
        scalers[0].step(plain)
        noisy.zero_grad()
        with noisy.sampled_params(loss_scale=scalers[1].get_scale()):
            scalers[1].scale(nn.functional.cross_entropy(twin(x), y)).backward()
        scalers[1].step(noisy)
        for scaler in scalers:
            scaler.update()
    for expected, got in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


# -- optimizer_step ---------------------------------------------------------------------------------------------------


class Steps(Classifier):
    """Overrides `optimizer_step`."""

    def __init__(self, take_step):
        super().__init__()
        self.take_step = take_step

    def configure_optimizers(self):
        self.own = torch.optim.Adam(self.parameters(), 0.01)
        return self.own

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.take_step(self, optimizer, optimizer_closure)


def closure_first(module, optimizer, closure):
    closure()
    optimizer.step()


def every_second(module, optimizer, closure):
    if module.training_steps % 2:
        optimizer.step(closure=closure)
    else:
        closure()


STEPS = {
    "raw optimizer": lambda m, o, closure: o.optimizer.step(closure),
    "wrapped closure": lambda m, o, closure: o.optimizer.step(lambda: closure()),
    "own optimizer": lambda m, o, closure: m.own.step(closure),
    "closure first": closure_first,
    "some steps": every_second,
}


@pytest.mark.parametrize("take_step", STEPS.values(), ids=STEPS.keys())
def test_a_modules_own_step_acts_as_in_plain_lightning(take_step):
    plain, ours, callback = Steps(take_step), Steps(take_step), without_noise()
    assert_same_bits(trained(ours, callback), trained(plain))
    assert callback.optimizer.num_updates == (6 if take_step is every_second else 12)
    assert "step" not in vars(ours.own)  # the redirection is gone


def test_a_step_without_the_closure_is_refused_by_name():
    with pytest.raises(NoMeasurementError, match=r"LightningModule\.optimizer_step, call optimizer\.step\(closure="):
        fit(Steps(lambda m, optimizer, closure: optimizer.step()), VOGNCallback())


# -- refused ----------------------------------------------------------------------------------------------------------


class SAM(torch.optim.SGD):
    def first_step(self): ...
    def second_step(self): ...


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        super().step(closure)


class AsksForClosure(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class CallsClosure(torch.optim.SGD):
    def step(self, closure=None):
        closure()


@pytest.mark.parametrize("optimizer", [SAM, NeedsClosure, AsksForClosure, CallsClosure])
def test_optimizers_of_two_gradients_are_refused_by_name(optimizer):
    module, callback = Classifier(lambda m: optimizer(m.parameters(), 0.01)), VOGNCallback()
    before = weights(module)
    with pytest.raises(UnsupportedTrainingError, match=rf"(?s){optimizer.__name__} computes the gradient.*Adam, AdamW"):
        fit(module, callback)
    assert_same_bits(weights(module), before)


class Embedded(Classifier):
    def __init__(self, configure):
        super().__init__(configure)
        self.table = nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(self.table(batch[0])), batch[1])


ROWS = DataLoader(TensorDataset(torch.arange(48) % 10, torch.arange(48) % 3), batch_size=8)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), 0.01), r"table \(Embedding.*sparse=False"),
        (lambda m: torch.optim.SparseAdam(m.table.parameters()), r"SparseAdam needs sparse gradients.*sparse=False"),
    ],
)
def test_sparse_gradients_are_refused_by_name(configure, message):
    with pytest.raises(UnsupportedTrainingError, match=message):
        fit(Embedded(configure), VOGNCallback(), data=ROWS)


def test_sparse_gradients_of_a_layer_without_noise_are_the_users():
    plain, ours = (Embedded(lambda m: torch.optim.SGD(m.parameters(), 0.01)) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    trained(plain, data=ROWS)
    trained(ours, VOGNCallback(bayesian=r"^net\.", relative_noise=1e-30), data=ROWS)
    assert_same_bits(weights(ours), weights(plain))


# -- hyperparameters that a safe load refuses -------------------------------------------------------------------------


class Tuned(Classifier):
    def __init__(self, criterion):
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:Attribute 'criterion' is an instance of .nn.Module.")
@pytest.mark.parametrize("value", ["module", "path"])
def test_objects_among_hyperparameters_are_named_with_a_way_out(value, tmp_path):
    criterion = nn.CrossEntropyLoss() if value == "module" else tmp_path
    kind = r"(CrossEntropyLoss|pathlib\S*PosixPath|pathlib\S*WindowsPath)"
    path = tmp_path / "last.ckpt"
    fit(Tuned(criterion), VOGNCallback()).save_checkpoint(path)
    message = rf"an object of the type \S*{kind}.*weights_only=False.*save_hyperparameters\(ignore="
    with pytest.raises(PosteriorError, match=message):
        load_posterior(path)


# -- weight decay and learning rates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("NAdamW", "decoupled"), ("Lion", "decoupled"), ("Lamb", "unknown")])
def test_decay_of_another_package_is_no_prior(name, kind, caplog):
    if not hasattr(timm.optim, name):
        pytest.skip(f"this version of timm has no {name}")
    callback = VOGNCallback()
    with caplog.at_level(logging.INFO):
        fit(configured(of_timm(name, weight_decay=0.1)), callback)
    (group,) = callback.optimizer.param_groups
    assert group["posterior"]["decay"] == kind
    assert effective(group).stated_prior == 0
    assert (f"weight_decay of {name} acts" in caplog.text) == (kind == "unknown")


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_learning_rate_monitor_logs_one_entry_per_group(scheduled, tmp_path):
    def configure(module):
        optimizer = torch.optim.AdamW(two_groups(module))
        return ([optimizer], [StepLR(optimizer, 1)]) if scheduled else optimizer

    monitor = LearningRateMonitor()
    trainer = fit(Classifier(configure), VOGNCallback(), monitor, logger=CSVLogger(tmp_path))
    rates = {name for name in trainer.callback_metrics if name.startswith("lr-")}
    assert rates == {"lr-VOGN/weights", "lr-VOGN/biases"}
