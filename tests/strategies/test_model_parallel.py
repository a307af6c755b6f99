"""Callbacks under Lightning's ModelParallelStrategy on two gloo ranks, against one process with whole weights."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny_training import CLASSES, FEATURES, LEFT, RIGHT, WHOLE, fixed_loader, loader, quiet_trainer
from torch import nn

from lightning_bayes import IVONCallback, VadamCallback, VOGNCallback, load_posterior
from lightning_bayes.callbacks import PosteriorScale
from lightning_bayes.errors import BayesError

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("fully_shard came with torch 2.6", allow_module_level=True)

pytestmark = pytest.mark.ddp
RANKS = 2


class Net(LightningModule):
    """Shards its network in configure_model, as Lightning asks for; `place` says what is sharded."""

    def __init__(self, place="net"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
        self.place, self.losses = place, []

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net, fsdp.FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        if self.place == "net":
            fsdp.fully_shard(self.net[0], mesh=mesh)
            fsdp.fully_shard(self.net, mesh=mesh)
        elif self.place == "module":
            fsdp.fully_shard(self, mesh=mesh)

    def forward(self, x):
        return self.net(x.double())

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.losses.append(F.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class SavingNet(Net):
    def training_step(self, batch, batch_idx):
        self.trainer.save_checkpoint("never.ckpt")


class SilentNet(Net):
    def training_step(self, batch, batch_idx):
        return None


CASES = {
    "IVON": (IVONCallback, {"lr": 0.05, "init_precision": 60.0}, {"gradient_clip_val": 0.1}),
    "Vadam": (VadamCallback, {"lr": 0.02, "mc_samples": 2}, {"accumulate_grad_batches": 3}),
}


def callback_of(case):
    kind, arguments, _ = CASES[case]
    return kind(prior_precision=2.0, num_data=48, eval_samples=4, **arguments)


def parallel(*, distributed=False):
    strategy = ModelParallelStrategy(
        data_parallel_size=RANKS, tensor_parallel_size=1, save_distributed_checkpoint=distributed
    )
    return {"strategy": strategy, "devices": RANKS, "use_distributed_sampler": False}


def train(case, batches, *others, module=None, ckpt_path=None, max_epochs=2, **options):
    torch.manual_seed(0)
    module, callback = module or Net(), callback_of(case)
    options = {**CASES[case][2], **options, "enable_checkpointing": bool(others), "max_epochs": max_epochs}
    trainer = quiet_trainer(callback, *others, num_sanity_val_steps=0, **options)
    trainer.fit(module, fixed_loader(batches), fixed_loader(batches), ckpt_path=ckpt_path)
    return trainer, module, callback


def numbers(trainer, module, callback):
    found = callback.optimizer.posterior()
    return {
        "mean": dict(found.mean),
        "precision": dict(found.precision),
        "losses": torch.stack(module.losses),
        "updates": trainer.global_step,
    }


def train_on_rank(rank):
    batches, found = (LEFT, RIGHT)[rank], {}
    for case in CASES:
        trainer, module, callback = train(case, batches, **parallel())
        found[case] = numbers(trainer, module, callback)
        trainer.test(module, fixed_loader(batches), verbose=False)
        found[case]["test"] = torch.stack(module.losses[-len(batches) :])
        predicted = trainer.predict(module, loader())
        found[case]["predicted"] = {
            name: torch.cat([p[name] for p in predicted]) for name in ("probs", "mutual_information")
        }
    return found


def test_two_ranks_take_the_updates_and_the_evaluation_of_one_process(tmp_path):
    ranks = run_on_ranks(train_on_rank, RANKS, tmp_path)
    for case in CASES:
        trainer, module, callback = train(case, WHOLE)
        expected = numbers(trainer, module, callback)
        trainer.test(module, fixed_loader(WHOLE), verbose=False)
        expected["test"] = torch.stack(module.losses[-len(WHOLE) :])
        predicted = trainer.predict(module, loader())
        for rank in ranks:
            for key in ("mean", "precision", "updates"):
                torch.testing.assert_close(rank[case][key], expected[key], rtol=1e-9, atol=1e-11, msg=f"{case}, {key}")
            for key, value in rank[case]["predicted"].items():
                wanted = torch.cat([p[key] for p in predicted])
                torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11, msg=f"{case}, {key}")
        for key in ("losses", "test"):  # of halves of equal size
            mean = (ranks[0][case][key] + ranks[1][case][key]) / 2
            torch.testing.assert_close(mean, expected[key], rtol=1e-9, atol=1e-11, msg=f"{case}, {key}")


def resume_on_rank(rank, path, distributed):
    batches, found = (LEFT, RIGHT)[rank], {}
    for case in CASES:
        place = f"{path}/{case}"
        keep = ModelCheckpoint(place, "{epoch}", save_top_k=-1, enable_version_counter=False)
        options = parallel(distributed=distributed)
        trainer, module, callback = train(case, batches, keep, **options)
        trainer.test(module, fixed_loader(batches), verbose=False)
        found[case] = {"whole": numbers(trainer, module, callback)}
        resumed = train(case, batches, ckpt_path=f"{place}/epoch=0.ckpt", **parallel(distributed=distributed))
        found[case]["resumed"] = numbers(*resumed)
        other = Net()
        tester = quiet_trainer(callback_of(case), **parallel(distributed=distributed))
        tester.test(other, fixed_loader(batches), ckpt_path=f"{place}/epoch=1.ckpt", verbose=False)
        found[case]["test"] = torch.stack(other.losses)
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_either_kind_of_checkpoint_resumes_bit_for_bit_and_holds_the_posterior(distributed, tmp_path):
    for rank in run_on_ranks(resume_on_rank, RANKS, tmp_path, str(tmp_path), distributed):
        for case, found in rank.items():
            whole = found["whole"]
            for key in ("mean", "precision", "updates"):
                torch.testing.assert_close(found["resumed"][key], whole[key], rtol=0, atol=0, msg=f"{case}, {key}")
            torch.testing.assert_close(found["test"], whole["losses"][-len(LEFT) :], rtol=0, atol=0, msg=case)
            loaded = load_posterior(tmp_path / case / "epoch=1.ckpt")
            for key in ("mean", "precision"):
                torch.testing.assert_close(dict(getattr(loaded, key)), whole[key], rtol=0, atol=0, msg=f"{case}, {key}")


def refuse_on_rank(rank, path):
    found = {}

    def attempt(name, function):
        try:
            function()
        except BayesError as error:
            found[name] = str(error)

    def fit(callback, *others, module=None, **options):
        trainer = quiet_trainer(callback, *others, num_sanity_val_steps=0, **parallel())
        trainer.fit(module or Net(), fixed_loader((LEFT, RIGHT)[rank]), **options)
        return trainer

    attempt("module", lambda: fit(callback_of("IVON"), module=Net("module")))
    attempt("nothing", lambda: fit(callback_of("IVON"), module=Net("nothing")))
    attempt("default step", lambda: fit(VadamCallback()))
    attempt("curvature", lambda: fit(VOGNCallback(lr=0.01)))
    attempt("linearized", lambda: fit(IVONCallback(linearized=True)))
    attempt("scale", lambda: fit(IVONCallback(), PosteriorScale()))
    module = Net()
    fit(callback_of("IVON"), module=module).save_checkpoint(f"{path}/ivon.ckpt")
    before = {name: value.full_tensor().clone() for name, value in module.state_dict().items()}
    attempt("inside", lambda: fit(callback_of("IVON"), module=SavingNet()))
    attempt("missing", lambda: fit(callback_of("Vadam"), module=module, ckpt_path=f"{path}/missing.ckpt"))
    plain = quiet_trainer(**parallel())
    plain.fit(Net(), fixed_loader((LEFT, RIGHT)[rank]))
    plain.save_checkpoint(f"{path}/adam.ckpt")
    attempt("adam", lambda: fit(callback_of("IVON"), module=module, ckpt_path=f"{path}/adam.ckpt"))
    after = {name: value.full_tensor() for name, value in module.state_dict().items()}
    return {"messages": found, "before": before, "after": after}


MESSAGES = {
    "module": r"fully_shard was called on FSDPNet itself, .*fully_shard\(self\.net",
    "nothing": r"No parameter of Net is sharded.*self\.device_mesh\['data_parallel'\]",
    "default step": r"The step 'user' needs the size of whole tensors.*Pass lr=",
    "curvature": r"These parameters are DTensors.*net\.0\.weight.*IVON, Vadam",
    "linearized": "linearized=True differentiates whole weights.*load_posterior",
    "scale": "PosteriorScale runs the network at whole weights.*in one process",
    "inside": "A checkpoint cannot be saved inside a pass.*on_train_batch_end",
    "missing": r"\S+missing\.ckpt cannot be loaded.*does not point to a valid checkpoint",
    "adam": "The checkpoint was not written with IVONCallback",
}


def test_what_spread_weights_do_not_allow_is_refused_and_the_weights_stay(tmp_path):
    for rank in run_on_ranks(refuse_on_rank, RANKS, tmp_path, str(tmp_path)):
        torch.testing.assert_close(rank["after"], rank["before"], rtol=0, atol=0)
        assert rank["messages"].keys() == MESSAGES.keys()
        for name, message in rank["messages"].items():
            assert re.match(MESSAGES[name], message), message


def train_without_losses(rank):
    options = {
        **parallel(),
        "strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        "devices": 1,
    }
    callback, module = callback_of("IVON"), SilentNet()
    trainer = quiet_trainer(callback, num_sanity_val_steps=0, **options)
    trainer.fit(module, fixed_loader(WHOLE))
    return {"steps": trainer.global_step, "updates": callback.optimizer.num_updates}


def test_batches_without_a_loss_update_nothing(tmp_path):
    """In one process; in several, Lightning refuses a training_step that returns None."""
    assert run_on_ranks(train_without_losses, 1, tmp_path) == [{"steps": 6, "updates": 0}]
