"""KFACCallback and NoisyKFACCallback on unmodified modules."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import (
    CLASSES,
    FEATURES,
    FEW,
    MANY,
    WHOLE,
    Classifier,
    ValidatedClassifier,
    adamw,
    assert_close,
    assert_same_bits,
    blobs,
    fit,
    fixed_loader,
    loader,
    mlp,
    quiet_trainer,
    two_groups,
    weights,
)
from torch import nn

from lightning_bayes import KFACCallback, MatrixGaussian, NoisyKFACCallback, load_posterior, mc_predict
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.optim import NoisyKFAC

CALLBACKS = [KFACCallback, NoisyKFACCallback]


class Residual(nn.Module):
    """A convolution with BatchNorm, in-place activation and in-place addition, as in ResNets."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.norm(self.conv(x))
        out += x
        return F.relu(out, inplace=True)


def residual_net():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
    return nn.Sequential(stem, Residual(4), nn.Flatten(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("net", [mlp, residual_net])
def test_works_without_arguments(callback, net):
    module = Classifier(net=net())
    before = weights(module)
    trainer = fit(module, callback(), data=loader(), max_epochs=5)
    assert all(value.isfinite().all() for value in module.state_dict().values())
    moved = [n for n, p in module.named_parameters() if torch.equal(p, before[n])]
    assert not moved
    assert trainer.global_step == 30


def test_groups_and_schedules_of_the_user_carry_over():
    def configure(module):
        optimizer = torch.optim.AdamW(two_groups(module))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    callback = NoisyKFACCallback()
    fit(Classifier(configure), callback, max_epochs=2)
    assert [group["lr"] for group in callback.optimizer.param_groups] == pytest.approx([3e-3 / 4, 5e-3 / 4])
    assert callback.optimizer.family.partition().layers[0].has_bias


def test_noisy_kfac_leaves_the_step_to_the_users_optimizer_unless_there_is_a_learning_rate():
    def settings(callback):
        fit(Classifier(), callback)
        group, state = callback.optimizer.param_groups[0], next(iter(callback.optimizer.state.values()))
        return group["posterior"]["step_rule"], group["posterior"]["relative_noise"], "output_inverse" in state

    assert settings(NoisyKFACCallback()) == ("user", 0.07, False)
    assert settings(NoisyKFACCallback(lr=1e-2)) == ("natural", None, True)
    assert settings(KFACCallback())[::2] == ("trust_region", True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (20, 200, 0.9)),
        ({"stats_interval": 5, "betas": (0.9, 0.8)}, (5, 200, 0.8)),
        ({"lr": 1e-2}, (10, 100, 0.95)),
    ],
)
def test_the_curvature_is_measured_less_often_where_the_step_does_not_need_it(arguments, expected):
    callback = NoisyKFACCallback(**arguments)
    own = callback.optimizer_kwargs
    assert (own["stats_interval"], own["inverse_interval"], callback.group_defaults["betas"][1]) == expected


def test_the_log_says_what_is_measured_where(caplog):
    module = Classifier(net=residual_net())
    with caplog.at_level(logging.INFO):
        fit(module, NoisyKFACCallback(max_side=16))
    expected = "factors for 1 layers, labels from the data (empirical Fisher), measured every 20 and inverted every 200"
    assert expected in caplog.text
    rest = "mean-field: net.1.conv (side 36 > max_side=16), net.3 (side 17 > max_side=16), net.0.2, net.1.norm."
    assert rest in caplog.text
    module.lightning_bayes_likelihood = Categorical()
    with caplog.at_level(logging.INFO):
        fit(module, NoisyKFACCallback())
    assert "factors for 3 layers, labels drawn from Categorical (Fisher)" in caplog.text


def test_the_checkpoint_holds_the_posterior(tmp_path):
    module, callback = ValidatedClassifier(net=residual_net()), NoisyKFACCallback()
    trainer = quiet_trainer(
        callback, ModelCheckpoint(dirpath=tmp_path, filename="last"), enable_checkpointing=True, max_epochs=2
    )
    trainer.fit(module, loader(), loader())
    posterior = load_posterior(tmp_path / "last.ckpt")
    assert isinstance(posterior, MatrixGaussian)
    assert posterior.factors.keys() == {"net.0.1.weight", "net.1.conv.weight", "net.3.weight"}
    assert posterior.biases == {"net.0.1.weight": "net.0.1.bias", "net.3.weight": "net.3.bias"}
    assert not posterior.precision  # normalisation layers are deterministic
    assert {f"net.{n}.{p}" for n in ("0.2", "1.norm") for p in ("weight", "bias")} <= posterior.constants.keys()
    live = callback.optimizer.posterior().to("cpu")
    assert_same_bits(posterior.mean, live.mean)
    assert_close(posterior.variance(), live.variance())
    x, _ = blobs().tensors
    prediction = mc_predict(residual_net(), posterior.select("net."), x, samples=4)
    assert prediction.probs.shape == (len(x), CLASSES)
    (validated,) = trainer.validate(module, loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert 0 < validated["val_loss"] < 3


def test_wrong_arguments_are_refused():
    with pytest.raises(HyperparameterError, match="inverse_interval=5 is below stats_interval=20"):
        NoisyKFACCallback(inverse_interval=5)
    with pytest.raises(HyperparameterError, match="fisher='exact' is unknown"):
        KFACCallback(fisher="exact")
    with pytest.raises(HyperparameterError, match="kl_clip=0 must be above 0; max_side=0 must be a whole number"):
        KFACCallback(kl_clip=0, max_side=0)


# -- processes --


class CountReductions(Callback):
    def __init__(self):
        self.sizes, self.own = [], dist.all_reduce

    def on_train_start(self, trainer, pl_module):
        dist.all_reduce = lambda *args, **kwargs: (self.sizes.append(args[0].numel()), self.own(*args, **kwargs))[1]

    def on_train_epoch_end(self, trainer, pl_module):
        dist.all_reduce = self.own


def train(batches, sampled=False, **options):
    module = Classifier(adamw, mlp())
    if sampled:
        module.lightning_bayes_likelihood = Categorical()
    callback, count = NoisyKFACCallback(stats_interval=2, inverse_interval=3, num_data=48), CountReductions()
    trainer = quiet_trainer(callback, count, max_epochs=1, **options)
    trainer.fit(module, fixed_loader(batches))
    assert isinstance(callback.optimizer, NoisyKFAC)
    states = {f"{n}/{k}": v for n, p in module.named_parameters() for k, v in callback.optimizer.state[p].items()}
    return {**weights(module), **{k: v for k, v in states.items() if isinstance(v, torch.Tensor)}}, count.sizes


def train_on_rank(rank):
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    return {
        "uneven": train((FEW, MANY)[rank], **ddp),
        "sampled": train(WHOLE, sampled=True, **ddp),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(train_on_rank, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.ddp
@pytest.mark.parametrize("name", ["uneven", "sampled"])
def test_ranks_are_identical_bit_for_bit(ranks, name):
    assert_same_bits(ranks[1][name][0], ranks[0][name][0])


@pytest.mark.ddp
def test_factors_travel_with_the_gradients_and_every_rank_inverts_them(ranks):
    """One reduction an update: the loss, ĝ and the weight, and on every second update S and A but not their product."""
    parameters = FEATURES * 6 + 6 + 6 * CLASSES + CLASSES
    sides = 6**2 + (FEATURES + 1) ** 2 + CLASSES**2 + 7**2
    without, with_factors = 1 + parameters + 1, 1 + parameters + sides + 1
    _, sizes = ranks[0]["uneven"]
    assert sizes == [with_factors, without] * 3


@pytest.mark.parametrize(
    ("callback", "factors"), [(NoisyKFACCallback, "kfac"), (KFACCallback, "kflr"), (KFACCallback, "kfra")]
)
def test_factors_of_backpack_train_an_unmodified_module(callback, factors, caplog):
    module, data = Classifier(), blobs()
    x, y = data.tensors
    before = F.cross_entropy(module(x), y).item()
    with caplog.at_level(logging.INFO):
        fit(
            module,
            callback(engine="backpack", factors=factors, stats_interval=1),
            max_epochs=4,
            accumulate_grad_batches=2,
        )
    assert F.cross_entropy(module(x), y) < before
    assert f"({factors} by BackPACK)" in caplog.text
