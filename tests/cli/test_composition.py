"""Compositions: the settings of each experiment, the rules by which parts combine, parts that need no file, refusals."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from composed import compose

from lightning_bayes.callbacks import VariationalCallback
from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.cli.composition import KINDS, configs_of, parts, recipes
from lightning_bayes.errors import ConfigError, HyperparameterError
from lightning_bayes.zoo import create_model, list_models, register_data, register_model
from lightning_bayes.zoo.registry import DATA, MODELS

pytestmark = pytest.mark.usefixtures("_seed_variables")

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

# Epochs, batch size, augmentation, milestones; Adam's decay alone; learning rate and decay of SGD.
SETTINGS = {
    ("cifar10", "lenet5"): (210, 128, False, None, 0.01, 0.001, 0.01),
    ("cifar10", "alexnet"): (160, 256, True, [80, 120], 1e-4, 0.1, 1e-4),
    ("cifar10", "vgg16_half"): (160, 128, True, [80, 120], 1e-4, 0.1, 1e-4),
    ("cifar10", "resnet18"): (160, 256, True, [80, 120], 5e-4, 0.1, 1e-4),
    ("imagenet", "resnet18_imagenet"): (91, 256, True, [35, 65, 85], 1e-4, 0.16, 1e-4),
}
RATES = {  # Adam's learning rate: under a posterior, alone
    ("cifar10", "lenet5"): (1e-3, 1e-3),
    ("cifar10", "resnet18"): (1e-3, 1e-3),
    ("digits", "lenet5"): (2e-3, 2e-3),
    ("digits", "mlp"): (1e-3, 1e-3),
    ("mnist", "lenet5"): (1e-3, 1e-3),
    ("fashion_mnist", "lenet5"): (1e-3, 1e-3),
    ("imagenet", "resnet18_imagenet"): (1e-3, 1.6e-3),
}


def arguments(config, *path):
    for key in path:
        config = config[key]["init_args"]
    return config


# -- the settings of the experiments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "expected"), SETTINGS.items(), ids=str)
def test_image_experiments_have_the_settings_of_their_papers(pair, expected):
    adam, sgd = compose("+".join([*pair, "adam"])), compose("+".join([*pair, "sgd"]))
    data = arguments(adam, "data")
    schedule = arguments(adam, "model")["lr_scheduler"] or {"init_args": {"milestones": None}}
    optimizer = arguments(sgd, "model", "optimizer")
    decay = arguments(adam, "model", "optimizer")["weight_decay"]
    found = (adam["trainer"]["max_epochs"], data["batch_size"], data["augment"], schedule["init_args"]["milestones"])
    assert (*found, decay, optimizer["lr"], optimizer["weight_decay"]) == expected


@pytest.mark.parametrize(("pair", "expected"), RATES.items(), ids=str)
def test_learning_rates_of_adam(pair, expected):
    found = [arguments(compose("+".join([*pair, method])), "model", "optimizer")["lr"] for method in ("ogn", "adam")]
    assert tuple(found) == expected


@pytest.mark.parametrize(("pair", "epochs"), [("digits+lenet5", 80), ("digits+mlp", 40), ("mnist+lenet5", 20)])
def test_small_sets_train_for_their_epochs(pair, epochs):
    config = compose("+".join([*pair.split("+"), "vogn"]))
    schedule = arguments(config, "model").get("lr_scheduler")
    assert config["trainer"]["max_epochs"] == epochs
    assert (schedule is not None) == (pair == "digits+lenet5")
    assert schedule is None or schedule["class_path"] == "lightning_bayes.zoo.CosineToEnd"
    assert config["trainer"]["callbacks"][-1]["init_args"] == {"mc_samples": 1, "eval_samples": 32}


def test_the_data_module_passes_its_augmentation_factor_to_callbacks():
    factors = {}
    for pair in SETTINGS:
        run = instantiate("+".join([*pair, "ogn"]), *QUIET)
        factors[pair] = run.datamodule.data_augmentation_factor
        given = compose("+".join([*pair, "ogn"]))["trainer"]["callbacks"][-1].get("init_args", {})
        assert "data_augmentation_factor" not in given  # so the callback asks the data module
    expected = {"imagenet": 5.0, "cifar10": 10.0}
    assert factors == {pair: 1.0 if pair[1] == "lenet5" else expected[pair[0]] for pair in SETTINGS}


@pytest.mark.parametrize(("data", "batches"), [("digits+lenet5", 35), ("mnist+lenet5", 430), ("cifar10+resnet18", 176)])
def test_vadagrads_temperature_falls_over_the_whole_run(data, batches):
    config = compose("+".join([*data.split("+"), "vadagrad"]))
    schedule = config["trainer"]["callbacks"][-1]["init_args"]["temperature"]["init_args"]
    assert schedule["steps"] == batches * config["trainer"]["max_epochs"]


# -- names ------------------------------------------------------------------------------------------------------------


RECIPE = "osawa2019_cifar10_lenet_vogn"


def test_a_recipe_is_found_by_its_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configs_of(RECIPE) == [str(recipes()[RECIPE])]
    for name in (RECIPE, f"{RECIPE}.yaml"):  # neither a folder nor a file hides a recipe, unless it is named
        (tmp_path / name).mkdir() if name == RECIPE else (tmp_path / name).write_text("{}")
    assert configs_of(RECIPE) == [str(recipes()[RECIPE])]
    assert configs_of(f"{RECIPE}.yaml") == [f"{RECIPE}.yaml"]


@pytest.mark.parametrize("text", ["{trainer: {max_epochs: 1}}", "trainer:\n  max_epochs: 1", "s3://bucket/config.yaml"])
def test_yaml_text_and_urls_stay(text):
    assert configs_of(text) == [text]


def test_no_name_is_both_a_recipe_and_a_part_or_of_two_kinds():
    names = [*recipes(), *(name for kind in KINDS for name in parts(kind))]
    assert len(names) == len(set(names))
    assert not any("+" in name for name in names)


def test_the_command_line_merges_the_configs_of_a_composition():
    """As its own merge does, and a part's settings for another part come before those of later parts."""
    config = instantiate("digits+mlp+sgd+calibration", *QUIET).config
    expected = compose("digits+mlp+sgd+calibration")
    assert config.trainer.max_epochs == expected["trainer"]["max_epochs"] == 40
    assert config.model.init_args.optimizer.init_args.lr == arguments(expected, "model", "optimizer")["lr"] == 0.05
    assert config.trainer.callbacks[-1].class_path == "lightning_bayes.Calibration"


@pytest.mark.parametrize("name", ["lenet5", "mlp", "alexnet", "resnet18", "resnet18_imagenet", "vgg16_half"])
def test_a_name_is_the_same_network_in_a_config_and_in_create_model(name):
    size = {"alexnet": "cifar10", "vgg16_half": "cifar10"}.get(name, "digits")
    shape = {"cifar10": {"in_channels": 3, "image_size": 32}, "digits": {"in_channels": 1, "image_size": 8}}[size]
    shape = {key: value for key, value in shape.items() if key in ("in_channels", *MODELS[name].options)}
    built = create_model(name, num_classes=10, **shape)
    assert str(instantiate(f"{size}+{name}+adam", *QUIET).model.model) == str(built)


def test_the_order_of_parts_does_not_matter():
    parted = compose("vogn+lenet5+digits")
    parted["trainer"]["logger"]["init_args"]["name"] = "digits_lenet5_vogn"
    assert parted == compose("digits+lenet5+vogn")


def test_a_part_may_be_a_file(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("trainer: {max_epochs: 3}\nvalues: {eval_samples: 5}\nwith: {vogn: {seed_everything: 7}}")
    config = compose("+".join(["digits", "lenet5", "vogn", str(path)]))
    assert (config["trainer"]["max_epochs"], config["seed_everything"]) == (3, 7)
    assert config["trainer"]["callbacks"][-1]["init_args"]["eval_samples"] == 5
    assert config["trainer"]["logger"]["init_args"]["name"] == "digits_lenet5_vogn_short"


# -- models and data without a file -----------------------------------------------------------------------------------


STRANGER = """
    from lightning.pytorch import LightningDataModule
    from torch import nn
    from lightning_bayes.callbacks import VariationalCallback
    from lightning_bayes.optim import VariationalOptimizer
    from lightning_bayes.optim.diagonal.family import DiagonalFamily
    from lightning_bayes.optim.diagonal.vogn import update
    from lightning_bayes.zoo import register_data, register_model
    from lightning_bayes.zoo.data import DigitsDataModule

    class StrangeVOGN(VariationalOptimizer):
        noisy = averages_curvature = True
        family_type = DiagonalFamily
        natural_update = staticmethod(update)
        own_defaults = {"betas": (0.0, 0.99)}

    class StrangeCallback(VariationalCallback):
        optimizer_class = StrangeVOGN

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
        ("strange_digits+lenet5+vogn", None),
    ],
)
def test_a_strangers_file_is_named_and_trained(stranger, name, width):
    __import__(stranger)
    run = instantiate(name, *QUIET, "--trainer.fast_dev_run=true")
    assert width is None or run.model.model[1].out_features == width
    run.trainer.fit(run.model, datamodule=run.datamodule)
    assert run.trainer.global_step == 1
    assert run.trainer.callback_metrics["val/cls/NLL"].isfinite()


@pytest.mark.parametrize("name", ["StrangeVOGN", "StrangeCallback"])
def test_a_strangers_optimizer_is_named_and_trained(stranger, name):
    run = instantiate(f"digits+mlp+{stranger}:{name}", *QUIET, "--trainer.fast_dev_run=true")
    run.trainer.fit(run.model, datamodule=run.datamodule)
    (callback,) = (found for found in run.trainer.callbacks if isinstance(found, VariationalCallback))
    assert type(callback.optimizer).__name__ == "StrangeVOGN"
    assert callback.group_defaults["betas"] == (0.0, 0.99)
    assert callback.optimizer.num_updates == 1
    assert run.config.trainer.logger.init_args.name == f"digits_mlp_{name}"


def test_a_strangers_model_is_created_by_name(stranger):
    __import__(stranger)
    model = create_model("strange_wide", num_classes=3, in_channels=1, image_size=8)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert list_models("strange*") == ["strange", "strange_wide"]


@pytest.mark.parametrize("name", ["lenet5", "alexnet_imagenet", "timm/resnet18", "torchvision/mobilenet_v2"])
def test_models_by_name_need_no_file(name):
    network = arguments(compose("+".join(["cifar10", name, "vogn"])), "model")["model"]
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
        ("digits+lennet+vogn", r"There is no part 'lennet' of digits.* Did you mean lenet5 or .*lightning-bayes list"),
        ("digits+mnist+vogn", r"digits\+mnist\+vogn has two parts of the same kind \(data, data, methods\)"),
        ("lenet5+vogn", r"lenet5\+vogn needs a value for image_size, in_channels, num_classes\. Choose a data set"),
        ("svhn+lenet5+vadagrad", r"needs a value for steps\. .*\+FILE\.yaml with `values: \{steps: \.\.\.\}`"),
        ("digits_lenet5_vogn", r"There is no part 'digits_lenet5_vogn', and .* Did you mean digits\+lenet5\+vogn\?"),
        ("json:strange", r"json registers no model or data set 'strange'"),
    ],
)
def test_a_composition_that_cannot_be_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        configs_of(name)
