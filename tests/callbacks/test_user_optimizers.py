"""Optimizers of other packages resume bit by bit with all of their state, or are refused by name."""

from __future__ import annotations

import pytest
import timm.optim
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from timm.optim import Adan, Lamb, Lookahead
from tiny_training import Classifier, assert_same_bits, flat_state, loader, mlp, quiet_trainer, weights

from lightning_bayes import OGNCallback, VOGNCallback, load_posterior
from lightning_bayes.callbacks.resumable import require_resumable
from lightning_bayes.errors import UnsupportedTrainingError


class CountsInGroups(torch.optim.Optimizer):
    """Its steps shrink with a count in the parameter groups and a global count in the state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / (group["count"] + self.state["all"]["steps"]))


class CountsInAnAttribute(CountsInGroups):
    """Its count is not in its state_dict."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.hidden_count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.hidden_count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / self.hidden_count)


OPTIMIZERS = {
    "counts in groups": CountsInGroups,
    "Lamb": lambda params: Lamb(params, lr=0.01),
    "Adan": lambda params: Adan(params, lr=0.01),
    "Lookahead": lambda params: Lookahead(torch.optim.Adam(params, lr=0.01), k=4),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def run(name, folder, resume=None, seed=0):
    """Three epochs with a checkpoint after each; the weights and all state of both optimizers."""
    module = Classifier(lambda m: OPTIMIZERS[name](list(m.parameters())), net=mlp(seed))
    callback, saving = VOGNCallback(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    quiet_trainer(callback, saving, max_epochs=3, enable_checkpointing=True).fit(module, loader(), ckpt_path=resume)
    state = callback.optimizer.state_dict()
    kept = {f"{p}.{k}": v for p, s in state["state"].items() for k, v in flat_state(s).items()}
    base = {f"base.{p}.{k}": v for p, s in state["base"]["state"].items() for k, v in flat_state(s).items()}
    groups = {f"group.{k}": torch.tensor(v) for k, v in state["base"]["param_groups"][0].items() if isinstance(v, int)}
    return {**weights(module), **kept, **base, **groups}


# The resumed run writes beside the first one's files, as a resumed run does.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(name, tmp_path):
    whole = run(name, tmp_path)
    assert_same_bits(run(name, tmp_path, resume=tmp_path / "epoch=0.ckpt", seed=5), whole)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_of_the_first_version_is_resumed(tmp_path):
    """Version 0.1.0.dev0 stored the base state with each parameter, and the initial size as ``scale``."""
    whole = run("SGD", tmp_path)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    for index, values in state.pop("base")["state"].items():
        state["state"][index]["base"] = values
    for values in state["state"].values():
        values["scale"] = values.pop("initial_rms")
    torch.save(checkpoint, tmp_path / "old.ckpt")
    old, new = (load_posterior(tmp_path / name) for name in ("old.ckpt", "epoch=0.ckpt"))
    assert_same_bits(old.precision, new.precision)
    assert_same_bits(run("SGD", tmp_path, resume=tmp_path / "old.ckpt", seed=5), whole)


def test_state_outside_of_the_state_dict_is_refused_before_training():
    module = Classifier(lambda m: CountsInAnAttribute(m.parameters()))
    before = weights(module)
    message = (
        r"CountsInAnAttribute keeps state outside of its state_dict \(in hidden_count\).*CountsInAnAttribute\.state"
    )
    with pytest.raises(UnsupportedTrainingError, match=message):
        quiet_trainer(VOGNCallback()).fit(module, loader())
    assert_same_bits(weights(module), before)
    assert module.training_steps == 0


def test_an_optimizer_that_does_not_step_need_not_be_resumable():
    callback = OGNCallback()
    quiet_trainer(callback).fit(Classifier(lambda m: CountsInAnAttribute(m.parameters())), loader())
    assert callback.optimizer.num_updates == 6


RECENT = [timm.optim.Mars] if hasattr(timm.optim, "Mars") else []  # the oldest timm lacks it


@pytest.mark.parametrize("build", [Lamb, Adan, *RECENT, lambda p: Lookahead(torch.optim.Adam(p))])
def test_the_rehearsal_leaves_the_optimizer_alone(build):
    net = mlp()
    before, optimizer = weights(net), build(list(net.parameters()))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    require_resumable(optimizer)
    assert_same_bits(weights(net), before)
    assert not optimizer.state_dict()["state"]
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
