"""Layers that are unfrozen during a fit: stage by stage, resumed in between, under `bayesian=`, and collected by SWAG."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint
from tiny_training import assert_same_bits, fit, loader, mlp, quiet_trainer, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_bayes import SWAGCallback, VOGNCallback
from lightning_bayes.errors import PosteriorError
from lightning_bayes.posthoc import SWAG
from lightning_bayes.zoo import BayesClassifier

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader."),
]


class Stages(BaseFinetuning):
    """Unfreezes the upper layer of the backbone in the second epoch and the lower one in the third."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch in {1, 2}:
            self.unfreeze_and_add_param_group(pl_module.backbone[4 - 2 * epoch], optimizer, lr=10.0 ** -(2 + epoch))


class Frees(Callback):
    """Sets `requires_grad` of the backbone; the optimizer has its parameters from the start."""

    def __init__(self, trains_at):
        self.trains_at = trains_at

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.backbone.requires_grad_(self.trains_at(trainer.current_epoch))


class Net(BayesClassifier):
    def __init__(self, trains_all=False):
        super().__init__(mlp(1), num_classes=3)
        self.backbone = nn.Sequential(mlp(2)[0], nn.Tanh(), nn.Linear(6, 4))
        self.trains_all = trains_all

    def forward(self, x):
        return super().forward(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad or self.trains_all], lr=0.01)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_fit_resumes_between_stages_as_in_plain_lightning(epoch, tmp_path):
    found = []
    for name, ours in (("plain", []), ("ours", [VOGNCallback(relative_noise=1e-30)])):
        saving = ModelCheckpoint(tmp_path / name, "{epoch}", save_top_k=-1)
        torch.manual_seed(0)
        fit(Net(), Stages(), saving, *ours, max_epochs=3, enable_checkpointing=True)
        torch.manual_seed(1)
        module = Net()
        trainer = quiet_trainer(Stages(), *ours, max_epochs=4)
        trainer.fit(module, loader(), ckpt_path=tmp_path / name / f"epoch={epoch}.ckpt")
        found.append(weights(module))
    assert_same_bits(found[1], found[0])


def test_a_layer_unfrozen_in_a_resumed_fit_has_the_settings_of_the_file(tmp_path):
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(Net(), Stages(), saving, VOGNCallback(), max_epochs=2, enable_checkpointing=True)
    callback = VOGNCallback()
    trainer = quiet_trainer(Stages(), callback, max_epochs=3)
    trainer.fit(Net(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    settings = [group["posterior"] for group in callback.optimizer.param_groups]
    assert len(settings) == 3
    assert {s["num_data"] for s in settings} == {48}
    assert len({(s["relative_noise"], s["noise_flatness"]) for s in settings}) == 1


@pytest.mark.parametrize("callbacks", [lambda: BackboneFinetuning(1), Stages])
def test_a_layer_without_a_posterior_has_none_once_it_is_unfrozen(callbacks):
    module, callback = Net(), VOGNCallback(bayesian=r"^model\.")
    fit(module, callback, callbacks(), max_epochs=3)
    posterior = callback.optimizer.posterior()
    assert posterior.mean.keys() == {name for name, _ in module.named_parameters() if name.startswith("model.")}
    assert all(name in posterior.constants for name, _ in module.named_parameters() if name.startswith("backbone."))


class Average(Callback):
    """The truth: torch's average of the weights after the second epoch and later ones."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.average = AveragedModel(pl_module)
        if trainer.current_epoch >= 1:
            self.average.update_parameters(pl_module)


@pytest.mark.parametrize("max_rank", [2, 20])
@pytest.mark.parametrize("trains_at", [lambda epoch: epoch >= 3, lambda epoch: epoch < 3], ids=["later", "at first"])
def test_swag_averages_weights_that_are_frozen_for_a_part_of_the_fit(trains_at, max_rank):
    module, average = Net(trains_all=True), Average()
    callback = SWAGCallback(start=0.2, max_rank=max_rank)
    fit(module, Frees(trains_at), average, callback, max_epochs=5)
    for (name, got), expected in zip(module.named_parameters(), average.average.module.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=name)
    assert callback.posterior.mean.keys() == dict(module.named_parameters()).keys()


def test_swag_of_weights_that_were_constant_is_that_of_their_iterates():
    iterates = [torch.tensor([value]) for value in (3.0, 3.0, 4.0, 6.0)]
    whole, late = SWAG(max_rank=3), SWAG(max_rank=3)
    for index, value in enumerate(iterates):
        if index == 2:
            late.add_constant({"w": iterates[0]})
        whole.collect({"v": value, "w": value})
        late.collect({"v": value, "w": value} if index > 1 else {"v": value})
    expected, found = (swag.posterior(10, {"v": 1.0, "w": 1.0}) for swag in (whole, late))
    torch.testing.assert_close(found.mean["w"], expected.mean["w"])
    torch.testing.assert_close(found.diagonal["w"], expected.diagonal["w"])
    torch.testing.assert_close(found.deviations["w"], expected.deviations["w"])


def test_swag_refuses_an_iterate_with_other_names():
    swag = SWAG()
    swag.collect({"v": torch.ones(1)})
    with pytest.raises(PosteriorError, match=r"differ in w\. .* add_constant first"):
        swag.collect({"v": torch.ones(1), "w": torch.ones(1)})
