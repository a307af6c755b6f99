"""Set-ups that cannot train a posterior raise an error that names the culprit and the next step, and change nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from tiny_training import Classifier, adamw, assert_same_bits, fit, loader, mlp, quiet_trainer, weights
from torch import nn

from lightning_bayes import (
    VOGN,
    DeepEnsembleCallback,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VOGNCallback,
)
from lightning_bayes.errors import (
    HyperparameterError,
    PosteriorError,
    UnsupportedLayerError,
    UnsupportedTrainingError,
)


def assert_refused(error, message, module, callback=None, **trainer):
    """`fit` raises before the first training_step and does not change the weights."""
    before = weights(module)
    with pytest.raises(error, match=message):
        fit(module, callback or VOGNCallback(), **trainer)
    assert_same_bits(weights(module), before)
    assert getattr(module, "training_steps", 0) == 0


# -- the module -----------------------------------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ManualSinceSetup(Classifier):
    def setup(self, stage):
        self.automatic_optimization = False


@pytest.mark.parametrize("module_class", [Manual, ManualSinceSetup])
def test_manual_optimization_is_refused_and_sampled_params_recommended(module_class):
    message = rf"{module_class.__name__} uses manual optimization.*VOGN\(self, num_data=N\).*sampled_params\(\)"
    assert_refused(UnsupportedTrainingError, message, module_class())


def test_the_recommended_way_works_in_manual_optimization():
    class Recommended(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            opt.zero_grad()
            with opt.sampled_params():
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            opt.step()

        def configure_optimizers(self):
            return VOGN(self, num_data=48, lr=0.05)

    module = Recommended()
    trainer = fit(module)
    assert trainer.optimizers[0].num_updates == 6


class TakesIterator(Classifier):
    def training_step(self, dataloader_iter):
        raise AssertionError("never called")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")  # Lightning's own warning
def test_dataloader_iter_is_refused():
    message = r"TakesIterator\.training_step takes dataloader_iter.*Take batch as the argument instead"
    assert_refused(UnsupportedTrainingError, message, TakesIterator())


# -- the optimizer --------------------------------------------------------------------------------------------------------


class WithoutRate(torch.optim.SGD):
    """transformers' Adafactor with its defaults."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None


class ScheduleFree(torch.optim.SGD):
    """schedule-free's optimizers, which train and evaluate different weights."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self):
        """Switch to the training weights."""


def frozen(module):
    return adamw(module.requires_grad_(False))


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            r"LBFGS calls its closure several times.*Return Adam, AdamW or SGD",
        ),
        (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), r"maximize=True: .* negative log-likelihood"),
        (frozen, r"Classifier has no trainable parameter in its optimizer\. Set requires_grad_\(True\)"),
        (lambda m: VOGN(m, num_data=48), r"The optimizer already is VOGN.*Return Adam, AdamW or SGD"),
        (
            lambda m: adamw(mlp()),
            r"parameters that Classifier does not, of the shapes \[\(6, 4\), .*that owns them a submodule",
        ),
        (lambda m: WithoutRate(m.parameters()), r"lr=None.*lr=1e-3"),
        (lambda m: ScheduleFree(m.parameters()), "schedule-free"),
    ],
    ids=["LBFGS", "maximize", "frozen", "noisy_already", "foreign", "without_rate", "schedule_free"],
)
def test_optimizer_that_cannot_be_swapped_is_refused(configure, message):
    assert_refused(UnsupportedTrainingError, message, Classifier(configure))


@pytest.mark.parametrize("optimizer_class", [torch.optim.Rprop, torch.optim.Adadelta])
def test_learning_rate_that_is_no_length_bounds_no_step(optimizer_class):
    module = Classifier(lambda m: optimizer_class(m.parameters()))
    message = rf"learning rate of {optimizer_class.__name__} is not the length of a step.*lr=\.\.\."
    assert_refused(UnsupportedTrainingError, message, module, OGNCallback())


@pytest.mark.parametrize("optimizer_class", [torch.optim.Rprop, torch.optim.Adadelta])
def test_explicit_learning_rate_makes_any_first_order_optimizer_swappable(optimizer_class):
    callback = VOGNCallback(lr=0.05)
    fit(Classifier(lambda m: optimizer_class(m.parameters())), callback)
    assert callback.optimizer.num_updates == 6


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")  # Lightning's own warning comes first
def test_configure_optimizers_that_returns_none_is_refused():
    message = r"swaps one optimizer, and configure_optimizers returned None\. Return one optimizer"
    assert_refused(UnsupportedTrainingError, message, Classifier(lambda m: None))


# -- the trainer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "test", "predict"])
@pytest.mark.parametrize(
    "callback",
    [VOGNCallback, IVONCallback, MCDropoutCallback, SWAGCallback, LaplaceCallback, lambda: DeepEnsembleCallback(2)],
)
def test_a_trainer_of_pytorch_lightning_is_refused_by_its_name(callback, stage):
    package = pytest.importorskip("pytorch_lightning")
    trainer = package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(
        UnsupportedTrainingError, match=r"pytorch_lightning.*Import the Trainer.* from lightning\.pytorch"
    ):
        callback().setup(trainer, Classifier(), stage)


class OwnFSDP(FSDPStrategy):
    """On a CPU, Lightning itself refuses FSDP, but not a subclass."""


class NoDeepSpeed(DeepSpeedStrategy):
    """Lightning builds it only where the package is installed, and runs it only on a GPU."""

    def __init__(self):
        super(DeepSpeedStrategy, self).__init__()


@pytest.mark.parametrize("strategy", [OwnFSDP, ModelParallelStrategy, NoDeepSpeed])
def test_strategy_that_shards_parameters_is_refused(strategy):
    trainer, module = quiet_trainer(strategy=strategy()), Classifier()
    with pytest.raises(
        UnsupportedTrainingError, match=rf"strategy {strategy.__name__} .*Use one device, strategy='ddp'"
    ):
        VOGNCallback().setup(trainer, module, "fit")
    assert "setup_optimizers" not in vars(trainer.strategy)


@pytest.mark.parametrize("second", [VOGNCallback, OGNCallback])
def test_two_callbacks_of_the_family_are_refused_by_lightning(second):
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type"):
        quiet_trainer(VOGNCallback(), second())


def test_second_callback_that_the_module_brings_is_refused():
    class Brings(Classifier):
        def configure_callbacks(self):
            return [OGNCallback()]

    assert_refused(UnsupportedTrainingError, r"The optimizer already is (VO|O)GN.*second callback", Brings())


def test_unknown_lightning_is_refused(monkeypatch):
    """A closure with other attributes than today's Lightning."""
    trainer = quiet_trainer(VOGNCallback())
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    monkeypatch.setattr(type(loop), "_make_closure", lambda self, batch, optimizer: None)
    with pytest.raises(
        UnsupportedTrainingError,
        match=r"Lightning 2\..*\._make_closure takes \(batch, optimizer\).*Install lightning 2\.5\.1",
    ):
        trainer.fit(Classifier(), loader())


# -- parameters no rule reaches -------------------------------------------------------------------------------------------


class Noisy(LightningModule):
    """Regression whose noise level is a parameter of the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_noise = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), None
        self.log_noise = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        error = self.net(batch[0]).squeeze(1) - batch[1]
        return (0.5 * error.square() * torch.exp(-2 * self.log_noise) + self.log_noise).mean()

    def configure_optimizers(self):
        return adamw(self)


class Pooled(Noisy):
    """Sums rows of a layer's output to examples, some of two rows and some of one."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        owners = torch.cat([torch.arange(len(x)), torch.arange(2)])
        hidden = torch.zeros(len(x), 4).index_add(0, owners, self.net[0](x[owners]))
        return F.mse_loss(self.net[2](hidden).squeeze(1), y.float())


def test_parameters_that_no_rule_reaches_are_named_before_any_update():
    module, callback = Pooled(), NoisyKFACCallback()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    message = r"No curvature rule can measure net\.0\.weight: .*Move it into"
    with pytest.raises(UnsupportedLayerError, match=message):
        fit(module, callback)
    assert callback.optimizer.num_updates == 0
    assert_same_bits({name: param.detach() for name, param in module.named_parameters()}, before)


@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the:UserWarning")
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("method", [VOGNCallback, NoisyKFACCallback])
def test_a_parameter_beside_the_layers_is_no_obstacle(method, is_frozen):
    module, callback = Noisy(), method()
    module.log_noise.requires_grad_(not is_frozen)
    fit(module, callback)
    assert callback.optimizer.num_updates == 6


# -- hyperparameters ------------------------------------------------------------------------------------------------------

NOT_POSITIVE = (
    "prior_precision",
    "kl_weight",
    "data_augmentation_factor",
    "init_precision",
    "num_data",
    "relative_noise",
)
NEGATIVE = ("lr", "kl_warmup_steps", "damping")
COUNTS = {"mc_samples": 1, "eval_samples": 0, "max_nonfinite_steps": 1}


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [(name, value, "above 0") for name in NOT_POSITIVE for value in (0.0, -1.0, math.nan, math.inf)]
    + [(name, value, "at least 0") for name in NEGATIVE for value in (-1e-3, math.nan, math.inf)]
    + [(name, value, f"a whole number of at least {least}") for name, least in COUNTS.items() for value in (-1, 1.5)]
    + [("mc_samples", 0, "a whole number of at least 1")]
    + [("kl_warmup_init", value, "above 0 and at most 1") for value in (0.0, 1.5, math.nan)]
    + [("betas", value, "two numbers of at least 0 and below 1") for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,))],
    ids=str,
)
def test_hyperparameter_out_of_range_is_refused_at_construction(argument, value, wanted):
    with pytest.raises(HyperparameterError) as caught:
        VOGNCallback(**{argument: value})
    assert str(caught.value) == f"{argument}={value!r} must be {wanted}."


@pytest.mark.parametrize(
    ("argument", "choices"),
    [
        ("engine", "'fused' or 'backpack'"),
        ("loss_reduction", "'auto', 'mean' or 'sum'"),
        ("link", "'classification', 'binary', 'multilabel', 'regression' or 'counts'"),
    ],
)
def test_unknown_choice_is_refused_before_the_first_step(argument, choices):
    with pytest.raises(HyperparameterError, match=rf"{argument}='nonsense' is unknown(; use|\. Use) {choices}"):
        fit(Classifier(), VOGNCallback(**{argument: "nonsense"}))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"prior": "nope.ckpt"},
            PosteriorError,
            r"prior='nope.ckpt' is not a file. Pass the checkpoint of an earlier fit",
        ),
        ({"prior": 3.0}, PosteriorError, r"prior=3.0 is a float. Pass a posterior or the path of a checkpoint."),
        ({"bayesian": "("}, HyperparameterError, r"bayesian='\(' is not a regular expression: .* Pass one for names"),
    ],
)
def test_a_file_that_is_missing_and_a_bad_pattern_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        VOGNCallback(**arguments)
