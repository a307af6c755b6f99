"""Compositions: the settings of each experiment, the rules by which parts combine, parts that need no file, refusals."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from lightning_bayes.cli import instantiate
from lightning_bayes.composition import KINDS, compose, parts, recipes, split_name
from lightning_bayes.config_lookup import find_configs, with_configs
from lightning_bayes.errors import ConfigError, HyperparameterError
from lightning_bayes.zoo import create_model, list_models, register_data, register_model
from lightning_bayes.zoo.registry import DATA, MODELS

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

# Epochs, batch size, augmentation, milestones; Adam's decay alone; learning rate and decay of SGD.
SETTINGS = {
    ("cifar10", "lenet"): (210, 128, False, None, 0.01, 0.001, 0.01),
    ("cifar10", "alexnet"): (160, 256, True, [80, 120], 1e-4, 0.1, 1e-4),
    ("cifar10", "vgg16"): (160, 128, True, [80, 120], 1e-4, 0.1, 1e-4),
    ("cifar10", "resnet18"): (160, 256, True, [80, 120], 5e-4, 0.1, 1e-4),
    ("imagenet", "resnet18"): (91, 256, True, [35, 65, 85], 1e-4, 0.16, 1e-4),
}
RATES = {  # Adam's learning rate: under a posterior, alone
    ("cifar10", "lenet"): (1e-3, 1e-3),
    ("cifar10", "resnet18"): (1e-3, 1e-3),
    ("digits", "lenet"): (2e-3, 2e-3),
    ("digits", "mlp"): (1e-3, 1e-3),
    ("mnist", "lenet"): (1e-3, 1e-3),
    ("fashion_mnist", "lenet"): (1e-3, 1e-3),
    ("imagenet", "resnet18"): (1e-3, 1.6e-3),
}


@pytest.fixture(autouse=True)
def _seed_variables(monkeypatch):
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")


def arguments(config, *path):
    for key in path:
        config = config[key]["init_args"]
    return config


# -- the settings of the experiments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "expected"), SETTINGS.items(), ids=str)
def test_image_experiments_have_the_settings_of_their_papers(pair, expected):
    adam, sgd = compose([*pair, "adam"]), compose([*pair, "sgd"])
    data = arguments(adam, "data")
    schedule = arguments(adam, "model")["lr_scheduler"] or {"init_args": {"milestones": None}}
    optimizer = arguments(sgd, "model", "optimizer")
    decay = arguments(adam, "model", "optimizer")["weight_decay"]
    found = (adam["trainer"]["max_epochs"], data["batch_size"], data["augment"], schedule["init_args"]["milestones"])
    assert (*found, decay, optimizer["lr"], optimizer["weight_decay"]) == expected


@pytest.mark.parametrize(("pair", "expected"), RATES.items(), ids=str)
def test_learning_rates_of_adam(pair, expected):
    found = [arguments(compose([*pair, method]), "model", "optimizer")["lr"] for method in ("ogn", "adam")]
    assert tuple(found) == expected


@pytest.mark.parametrize(("pair", "epochs"), [("digits+lenet", 80), ("digits+mlp", 40), ("mnist+lenet", 20)])
def test_small_sets_train_for_their_epochs(pair, epochs):
    config = compose([*pair.split("+"), "vogn"])
    schedule = arguments(config, "model").get("lr_scheduler")
    assert config["trainer"]["max_epochs"] == epochs
    assert (schedule is not None) == (pair == "digits+lenet")
    assert schedule is None or schedule["init_args"] == {"T_max": 80}
    assert config["trainer"]["callbacks"][-1]["init_args"] == {"mc_samples": 1, "eval_samples": 32}


def test_the_data_module_passes_its_augmentation_factor_to_callbacks():
    factors = {}
    for pair in SETTINGS:
        run = instantiate("+".join([*pair, "ogn"]), *QUIET)
        factors[pair] = run.datamodule.data_augmentation_factor
        given = compose([*pair, "ogn"])["trainer"]["callbacks"][-1].get("init_args", {})
        assert "data_augmentation_factor" not in given  # so the callback asks the data module
    expected = {"imagenet": 5.0, "cifar10": 10.0}
    assert factors == {pair: 1.0 if pair[1] == "lenet" else expected[pair[0]] for pair in SETTINGS}


@pytest.mark.parametrize(("data", "batches"), [("digits+lenet", 35), ("mnist+lenet", 430), ("cifar10+resnet18", 176)])
def test_vadagrads_temperature_falls_over_the_whole_run(data, batches):
    config = compose([*data.split("+"), "vadagrad"])
    schedule = config["trainer"]["callbacks"][-1]["init_args"]["temperature"]["init_args"]
    assert schedule["steps"] == batches * config["trainer"]["max_epochs"]


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_of_three_parts_joined_by_underscores_are_compositions():
    for data, model, method in [("digits", "lenet", "noisy_adam_fisher"), ("fashion_mnist", "mlp", "adam")]:
        assert split_name(f"{data}_{model}_{method}") == (data, model, method)
        assert find_configs([f"{data}_{model}_{method}.yaml"])[0] == find_configs([f"{data}+{model}+{method}"])[0]
    assert split_name("digits_lenet") == ()


def test_no_name_is_both_a_recipe_and_a_part_or_of_two_kinds():
    names = [*recipes(), *(name for kind in KINDS for name in parts(kind))]
    assert len(names) == len(set(names))
    assert not any("+" in name for name in names)


def test_a_recipe_goes_before_the_composition_of_its_name():
    path = str(recipes()["imagenet_resnet18_vogn"])
    assert find_configs(["imagenet+resnet18+vogn"])[0] == find_configs(["imagenet_resnet18_vogn.yaml"])[0] == path
    assert with_configs(["-c", "imagenet", "-c", "resnet18", "-c", "vogn"]) == ["-c", path]


def test_what_is_composed_stays_as_it_is():
    """DDP starts its processes with the arguments of the first, whose configs are text that no file name can hold."""
    words = with_configs(["fit", "--config", "digits+lenet+vogn"])
    assert len(words[-1]) > 255
    assert with_configs(words) == words


def test_parts_that_are_given_one_by_one_make_one_composition():
    text = "{}"  # a config of its own, which stays
    one = with_configs(["fit", "--config", "digits+lenet+vogn", "--config", text])
    assert with_configs(["fit", "--config", "digits", "--config", "lenet", "-c=vogn", "--config", text]) == one
    assert json.loads(one[2]) == compose(["digits", "lenet", "vogn"])


def test_the_order_of_parts_does_not_matter():
    parted = compose(["vogn", "lenet", "digits"])
    parted["trainer"]["logger"]["init_args"]["name"] = "digits_lenet_vogn"
    assert parted == compose(["digits", "lenet", "vogn"])


def test_a_part_may_be_a_file(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("trainer: {max_epochs: 3}\nvalues: {eval_samples: 5}\nwith: {vogn: {seed_everything: 7}}")
    config = compose(["digits", "lenet", "vogn", str(path)])
    assert (config["trainer"]["max_epochs"], config["seed_everything"]) == (3, 7)
    assert config["trainer"]["callbacks"][-1]["init_args"]["eval_samples"] == 5
    assert config["trainer"]["logger"]["init_args"]["name"] == "digits_lenet_vogn_short"


# -- models and data without a file -----------------------------------------------------------------------------------


STRANGER = """
    from lightning.pytorch import LightningDataModule
    from torch import nn
    from lightning_bayes.zoo import register_data, register_model
    from lightning_bayes.zoo.data import DigitsDataModule

    @register_model("strange")
    @register_model("strange_wide", width=32)
    class Strange(nn.Sequential):
        def __init__(self, num_classes: int, in_channels: int, image_size: int, width: int = 8) -> None:
            super().__init__(
                nn.Flatten(), nn.Linear(in_channels * image_size**2, width), nn.ReLU(), nn.Linear(width, num_classes)
            )

    @register_data("strange_digits")
    class StrangeDigits(LightningDataModule):
        num_classes, in_channels, image_size = 10, 1, 8

        def __init__(self, batch_size: int = 16) -> None:
            super().__init__()
            self.inner = DigitsDataModule(batch_size=batch_size)

        def setup(self, stage: str) -> None:
            self.inner.setup(stage)

        def train_dataloader(self):
            return self.inner.train_dataloader()

        def val_dataloader(self):
            return self.inner.val_dataloader()
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module outside of the package, with a model and a data set of its own."""
    (tmp_path / "stranger.py").write_text(textwrap.dedent(STRANGER), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    known_models, known_data = dict(MODELS), dict(DATA)
    yield "stranger"
    sys.modules.pop("stranger", None)
    for registry, known in ((MODELS, known_models), (DATA, known_data)):
        registry.clear()
        registry.update(known)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("digits+stranger:strange+vogn", 8),
        ("digits+stranger:strange_wide+noisy_kfac", 32),
        ("stranger:strange_digits+strange+vogn", 8),
        ("strange_digits+lenet+vogn", None),
    ],
)
def test_a_strangers_file_is_named_and_trained(stranger, name, width):
    __import__(stranger)
    run = instantiate(name, *QUIET, "--trainer.fast_dev_run=true")
    assert width is None or run.model.model[1].out_features == width
    run.trainer.fit(run.model, datamodule=run.datamodule)
    assert run.trainer.global_step == 1
    assert run.trainer.callback_metrics["val/cls/NLL"].isfinite()


def test_a_strangers_model_is_created_by_name(stranger):
    __import__(stranger)
    model = create_model("strange_wide", num_classes=3, in_channels=1, image_size=8)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert list_models("strange*") == ["strange", "strange_wide"]


@pytest.mark.parametrize("name", ["lenet5", "alexnet_imagenet", "timm/resnet18", "torchvision/mobilenet_v2"])
def test_models_by_name_need_no_file(name):
    network = arguments(compose(["cifar10", name, "vogn"]), "model")["model"]
    assert network["init_args"]["num_classes"] == 10
    assert network["init_args"].get("image_size", 224) == (32 if name == "lenet5" else 224)


def test_a_name_is_given_to_one_object(stranger):
    with pytest.raises(HyperparameterError, match=r"cannot be registered as 'lenet5', because .*lenet\.LeNet5 already"):
        register_model("lenet5")(torch.nn.Linear)
    with pytest.raises(
        HyperparameterError, match=r"cannot be registered as 'mnist', because .*MNISTDataModule already"
    ):
        register_data("mnist")(DATA["digits"])
    register_data("mnist")(DATA["mnist"])  # as when a module is imported again


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digits+lennet+vogn", r"There is no part 'lennet'\. Did you mean lenet or .*lightning-bayes list configs"),
        ("digits+mnist+vogn", r"digits\+mnist\+vogn has two parts of the same kind \(data, data, methods\)"),
        ("lenet+vogn", r"lenet\+vogn needs a value for image_size, in_channels, num_classes\. Choose a data set"),
        ("svhn+lenet+vadagrad", r"needs a value for steps\. .*\+FILE\.yaml with `values: \{steps: \.\.\.\}`"),
        ("digits_lenet_vgn", r"There is no config digits_lenet_vgn: no file in .* and no packaged config"),
    ],
)
def test_a_composition_that_cannot_be_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        find_configs([name])[0]
