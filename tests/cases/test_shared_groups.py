"""What a user changes at the optimizer acts as in plain Lightning, bit for bit: the truth is the same module without us."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from tiny_training import Classifier, loader, mlp, quiet_trainer
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, OneCycleLR, SequentialLR

from lightning_bayes import VOGNCallback
from lightning_bayes.optim.effective import effective

_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum")


class Watched(Classifier):
    """Records what its optimizer sees before each step, through a hook that the user registers."""

    def __init__(self, build=lambda p: AdamW(p, 0.02), scheduler=None, before_batch=None, before_step=None):
        super().__init__()
        self.build, self.scheduler, self.seen = build, scheduler, []
        self.before_batch, self.before_step = before_batch, before_step

    def configure_optimizers(self):
        self.own = self.build([p for p in self.parameters() if p.requires_grad])
        self.own.register_step_pre_hook(
            lambda o, *_: self.seen.append([[g.get(key) for key in _KEYS] for g in o.param_groups])
        )
        if self.scheduler is None:
            return self.own
        return {"optimizer": self.own, "lr_scheduler": {"scheduler": self.scheduler(self.own), "interval": "step"}}

    def on_train_batch_start(self, batch, batch_idx):
        if self.before_batch is not None:
            self.before_batch(self)

    def on_before_optimizer_step(self, optimizer):
        if self.before_step is not None:
            self.before_step(self)


def set_in_all_groups(**values):
    def change(module):
        for group in module.optimizers().param_groups:
            group.update({key: value(module.global_step) for key, value in values.items()})

    return change


def drop_gradient(module):
    if module.global_step % 2:
        module.net[0].weight.grad = None


class Own(Watched):
    """A scheduler that the module keeps to itself, on its own optimizer."""

    def configure_optimizers(self):
        super().configure_optimizers()
        self.kept = LambdaLR(self.own, lambda step: 1 / (1 + step))
        return self.own

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.step()


class Warmed(Watched):
    """A warm-up by hand, as in Lightning's documentation of optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (self.trainer.global_step + 1) / 6)


class Thawed(Watched):
    """A layer that is frozen in the second epoch only."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch != 1)


class Grown(Watched):
    """A group that is added by hand."""

    def configure_optimizers(self):
        self.net[0].requires_grad_(self.current_epoch > 0)
        return super().configure_optimizers()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.net[0].parameters()), "lr": 0.01})


CASES = {
    "warm-up by hand": Warmed,
    "frozen for an epoch": Thawed,
    "a group by hand": Grown,
    "one cycle": lambda: Watched(scheduler=lambda o: OneCycleLR(o, 0.05, total_steps=40)),
    "one cycle, SGD": lambda: Watched(
        lambda p: SGD(p, 1e-4, momentum=0.9), scheduler=lambda o: OneCycleLR(o, 1e-3, total_steps=40)
    ),
    "sequence": lambda: Watched(
        scheduler=lambda o: SequentialLR(o, [ConstantLR(o, 0.1, 4), LambdaLR(o, lambda t: 1 / (1 + t))], [4])
    ),
    "kept scheduler": Own,
    "weight decay": lambda: Watched(before_batch=set_in_all_groups(weight_decay=lambda t: 0.1 + 0.01 * t)),
    "betas and eps": lambda: Watched(
        before_batch=set_in_all_groups(betas=lambda t: (0.9 - 0.01 * t, 0.99), eps=lambda t: 10.0**-8 * (t + 1))
    ),
    "penalty": lambda: Watched(lambda p: Adam(p, 0.02, weight_decay=0.1)),
    "no gradient": lambda: Watched(before_step=drop_gradient),
}


def trained(module, *callbacks, **options):
    quiet_trainer(*callbacks, **{"max_epochs": 3, **options}).fit(module, loader())
    return module


def assert_equal(plain, bayesian):
    assert plain.seen == bayesian.seen
    for (name, expected), got in zip(plain.named_parameters(), bayesian.parameters(), strict=True):
        assert torch.equal(expected, got), name


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_without_noise_training_is_the_users_bit_for_bit(build):
    assert_equal(trained(build()), trained(build(), VOGNCallback(relative_noise=1e-30)))


def test_the_width_follows_a_schedule_of_the_l2_penalty():
    callback = VOGNCallback()
    change = set_in_all_groups(weight_decay=lambda t: 0.01 * (t + 1))
    trained(Watched(lambda p: Adam(p, 0.01, weight_decay=0.01), before_batch=change), callback)
    (group,) = callback.optimizer.param_groups
    hyper = effective(group)
    assert hyper.stated_prior == group["weight_decay"] > 0.1
    assert hyper.prior_precision == group["weight_decay"] * 48


class Frozen(Watched):
    def __init__(self):
        super().__init__(lambda p: Adam(p, 0.02))
        torch.manual_seed(0)
        self.backbone, self.net = nn.Linear(4, 4), mlp()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(self.backbone(batch[0]).tanh()), batch[1])


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_fit_resumes_after_its_backbone_is_unfrozen_as_in_plain_lightning(tmp_path):
    modules = []
    for name, ours in (("plain", []), ("ours", [VOGNCallback(relative_noise=1e-30)])):
        saving = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1)
        trained(Frozen(), *ours, BackboneFinetuning(1), saving, enable_checkpointing=True)
        resumed = Frozen()
        quiet_trainer(*ours, BackboneFinetuning(1), max_epochs=5).fit(
            resumed, loader(), ckpt_path=tmp_path / name / "epoch=2.ckpt"
        )
        modules.append(resumed)
    assert_equal(*modules)
    assert len(modules[1].seen[-1]) == 2
