"""Packaged recipes and compositions parse, and train, validate and test for one batch."""

from __future__ import annotations

import gc
import re
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from composed import compose
from fake_images import write_cifar10, write_idx_sets, write_image_folder
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torchvision.datasets import CIFAR10

import lightning_bayes
from lightning_bayes import BBBCallback, KFACCallback, NoisyAdamCallback, NoisyKFACCallback
from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.cli.composition import configs_of, parts, recipes

pytestmark = pytest.mark.usefixtures("_seed_variables")

METHODS = {name.removesuffix("Callback").lower(): name for name in lightning_bayes.__all__ if name.endswith("Callback")}
METHODS |= {"kfacbackpack": "KFACCallback", "noisykfacbackpack": "NoisyKFACCallback"}
METHODS |= {"adam": None, "sgd": None, "imagefolder": "VOGNCallback", "reparameterisedvon": "VONCallback"}
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

PAIRS = [  # data and models whose shapes fit
    *product(("digits", "mnist", "fashion_mnist"), ("lenet5", "mlp", "resnet18")),
    *product(("cifar10",), ("lenet5", "mlp", "alexnet", "vgg16_half", "resnet18")),
    *product(("imagenet",), ("alexnet_imagenet", "resnet18_imagenet")),
]
BY_BACKPACK = {"von", "cvi", "momentum_von", "noisy_adam_fisher", "kfac_backpack", "noisy_kfac_backpack"}
PLAIN = {"lenet5", "mlp", "alexnet"}  # without BatchNorm, which BackPACK does not support in training mode
EVERY = [
    f"{data}+{model}+{method}"
    for (data, model), method in product(PAIRS, parts("methods"))
    if method not in BY_BACKPACK or model in PLAIN
]


def covering():
    """Every recipe, every method on the digits, and every other pair of data and model with one method."""
    others = [pair for pair in PAIRS if pair not in {("digits", "lenet5"), ("imagenet", "alexnet_imagenet")}]
    methods = cycle(("vogn", "noisy_kfac", "mc_dropout", "sgd", "bbb", "adam"))
    pairs = [f"{data}+{model}+{method}" for (data, model), method in zip(others, methods, strict=False)]
    return [*recipes(), *(f"digits+lenet5+{method}" for method in parts("methods")), *pairs]


def variants():
    """The other columns of Zhang et al.'s Table 2, without augmentation or BatchNorm, and Osawa's without augmentation."""
    plain, no_norm = "--data.augment=false", "--model.model.norm=none"
    clip = "--trainer.callbacks.kl_clip.start=0.001"
    table = "zhang2018_cifar10_vgg16_"
    published = "--trainer.callbacks.name=zhang2018-cifar10-vgg16"
    yield from ((f"{table}sgd", options) for options in ((plain,), (no_norm,), (plain, no_norm)))
    yield from ((f"{table}kfac", options) for options in ((plain,), (no_norm, clip), (plain, no_norm, clip)))
    for options in (
        (plain, f"{published}-batchnorm"),
        (no_norm, f"{published}-augmented"),
        (plain, no_norm, published),
    ):
        yield f"{table}noisy_kfac", options
    yield f"{table}noisy_adam", ("--data.augment=true", "--trainer.callbacks.dict_kwargs.kl_weight=0.1")
    yield f"{table}bbb", ("--data.augment=true", "--trainer.callbacks.kl_weight=0.1")
    for name in ("cifar10+alexnet+adam", "cifar10+alexnet+mc_dropout", "osawa2019_cifar10_alexnet_vogn"):
        yield name, (plain,)


def callback_of(name):
    """The callback by the longest matching suffix of a config's name, such as ``vogn`` rather than ``ogn``."""
    words = re.sub(r"[_+]|\.yaml$", "", name)
    return METHODS[max((method for method in METHODS if words.endswith(method)), key=len)]


def class_paths(node):
    """All class paths in a part of a config."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    own = {node["class_path"]} if isinstance(node, dict) and "class_path" in node else set()
    return own.union(*map(class_paths, inner))


def enough():
    """Configs that together cover all class paths."""
    seen, names = set(), []
    for name in covering():
        names += [] if class_paths(compose(name)) <= seen else [name]
        seen |= class_paths(compose(name))
    return names


@pytest.fixture(autouse=True)
def _collected():
    """Break reference cycles of trainers and modules, which would keep the networks of all tests in memory."""
    yield
    gc.collect()


@pytest.fixture
def data_options(name, tmp_path, monkeypatch):
    """Options that replace a data set that is not on this disk with a tiny one."""
    if name.startswith("digits"):
        return small_options(name) if "resnet18" in name else []
    if name.startswith("finetune_imagefolder"):
        write_image_folder(tmp_path / "pictures")
        small = [
            "--data.image_size=64",
            "--data.resize=64",
            "--data.num_workers=0",
            "--trainer.callbacks.eval_samples=2",
        ]
        return [f"--data.root={tmp_path / 'pictures'}", "--data.val_size=4", *small]
    small = small_options(name)
    if name.startswith("imagenet"):
        for part in ("train", "val"):
            write_image_folder(tmp_path / part)
        small += ["--model.num_classes=2", "--model.model.num_classes=2", "--data.num_workers=0"]
        small += [] if "alexnet" in name else ["--data.image_size=64", "--data.resize=64"]
        return [f"--data.root={tmp_path}", "--data.val_size=4", "--data.batch_size=4", *small]
    write_idx_sets(tmp_path)
    for attribute, value in write_cifar10(tmp_path).items():
        monkeypatch.setattr(CIFAR10, attribute, value)
    return [f"--data.root={tmp_path}", "--data.val_size=8", "--data.batch_size=4", *small]


def small_options(name):
    """Few samples, small factors, and one process without noise groups; other tests cover these settings."""
    callback = compose(name)["trainer"]["callbacks"][-1]
    preset = callback["class_path"].endswith("from_preset")
    where = "--trainer.callbacks.dict_kwargs" if preset else "--trainer.callbacks"
    options = []
    without_samples = {"OGNCallback", "KFACCallback", "Vprop0Callback", "DeepEnsembleCallback", "MultiModeCallback"}
    if callback_of(name) not in {None, *without_samples}:
        options += [f"{where}.eval_samples=2"]
    if callback_of(name) in {"KFACCallback", "NoisyKFACCallback"}:
        options += [f"{where}.max_side=64"]
    if callback_of(name) == "CVICallback":
        options += [f"{where}.mc_samples=1"]
    return [*options, "--trainer.strategy=auto", "--trainer.accumulate_grad_batches=1"]


def checkpoints_that_it_reads(name):
    """Checkpoint paths of a `WarmStart`."""
    arguments = [entry.get("init_args", {}) for entry in compose(name)["trainer"]["callbacks"]]
    return [given["path"] for given in arguments if given.get("path")]


def train_what_it_reads(name, data_options):
    """Write the checkpoints that a config expects, by running their configs for one batch."""
    for path in checkpoints_that_it_reads(name):
        other = Path(path).parts[1]  # runs/{name of the config}/…
        one = [f"--trainer.{option}=1" for option in ("max_epochs", "limit_train_batches", "log_every_n_steps")]
        run = instantiate(other.replace("_", "+", 2), *QUIET, *one, *data_options)
        run.trainer.fit(run.model, datamodule=run.datamodule)
        del run
        gc.collect()


def run_for_one_batch(name, *options):
    run = instantiate(name, *QUIET, "--trainer.fast_dev_run=true", *options)
    start = {key: value.clone() for key, value in run.model.model.state_dict().items()}
    run.trainer.fit(run.model, datamodule=run.datamodule)
    assert run.trainer.global_step == 1
    assert run.trainer.callback_metrics["val/cls/NLL"].isfinite()
    kept = {key for key, value in run.model.model.state_dict().items() if torch.equal(value, start[key])}
    assert kept == {key for key, param in run.model.model.named_parameters() if not param.requires_grad}
    (*_, results) = run.trainer.test(run.model, datamodule=run.datamodule, verbose=False)
    assert 0 <= results["test/cls/Acc"] <= 1
    return results


def light(names):
    """Large networks are slow tests, except for one recipe."""
    heavy = re.compile(r"resnet18|imagenet|alexnet\+|\+vgg16|alexnet_k|alexnet_n")
    slow = [name for name in names if heavy.search(name) and name != "osawa2019_cifar10_resnet18_vogn"]
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


few_data = pytest.mark.filterwarnings("ignore:The search for the prior precision ended")  # they tell little of a prior


@few_data
@pytest.mark.parametrize("name", light(covering()))
def test_runs_for_one_batch(name, data_options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_what_it_reads(name, data_options)
    results = run_for_one_batch(name, *data_options)
    assert ("ood/AUROC" in results) == name.startswith("digits")


@few_data
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name not in covering()])
def test_every_composition_runs_for_one_batch(name, data_options, tmp_path, monkeypatch):
    test_runs_for_one_batch(name, data_options, tmp_path, monkeypatch)


@few_data
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in covering() if re.match("digits.(lenet|mlp)", name)])
def test_trains_digits_in_a_few_epochs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_what_it_reads(name, [])
    # CVI takes ten passes a batch; the recipe that continues another has half of its learning rate.
    epochs = {"digits+lenet5+cvi": 3, "digits_lenet5_ogn_then_vogn": 10}.get(name, 5)
    run = instantiate(name, *QUIET, f"--trainer.max_epochs={epochs}")
    run.trainer.fit(run.model, datamodule=run.datamodule)
    assert run.trainer.callback_metrics["val/cls/Acc"] > 0.8


@pytest.mark.parametrize(("name", "overrides"), list(variants()))
def test_documented_overrides_run_for_one_batch(name, overrides, data_options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_for_one_batch(name, *overrides, *data_options)


def test_every_column_of_zhang_et_al_has_a_config_with_the_papers_numbers():
    """Their Table 2 has no entries for BBB and Noisy Adam with BatchNorm. λ, η and c₀ are from their appendix C.2."""
    found = set()
    for name, overrides in [*((name, ()) for name in recipes()), *variants()]:
        if not name.startswith("zhang2018"):
            continue
        run = instantiate(name, *QUIET, *overrides)
        augments = run.datamodule.augmentation is not None
        has_norm = any(isinstance(module, nn.BatchNorm2d) for module in run.model.modules())
        found.add((callback_of(name), augments, has_norm))
        for callback in run.trainer.callbacks:
            if isinstance(callback, (BBBCallback, NoisyAdamCallback, NoisyKFACCallback)):
                assert callback.group_defaults["kl_weight"] == (0.1 if augments else 0.5)
                assert has_norm or callback.arguments.prior_precision == 1 / 0.1
            if isinstance(callback, (KFACCallback, NoisyKFACCallback)):
                assert callback.group_defaults["kl_clip"](0) == (0.01 if has_norm else 0.001)
    methods = (None, "KFACCallback", "NoisyKFACCallback", "BBBCallback", "NoisyAdamCallback")
    cells = set(product(methods, (False, True), (False, True)))
    assert found == cells - set(product(methods[3:], (False, True), (True,)))


@pytest.mark.parametrize("name", enough())
def test_a_plain_lightning_cli_reads_it(name, monkeypatch):
    monkeypatch.setattr("sys.argv", ["theirs"])
    counted = (
        ["--model.model.num_classes=2"] if name.startswith("finetune") else []
    )  # only this package's CLI counts folders
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        auto_configure_optimizers=False,
        args=[*(f"--config={config}" for config in configs_of(name)), "--trainer.accelerator=cpu", *counted],
        run=False,
    )
    assert cli.trainer.max_epochs == compose(name)["trainer"]["max_epochs"]


def test_each_config_matches_its_name():
    for name in (*recipes(), *EVERY):
        config, callback = compose(name), callback_of(name)
        callbacks = [entry["class_path"] for entry in config["trainer"]["callbacks"]]
        ours = [path for path in callbacks if path.startswith("lightning_bayes.")]
        expected = [] if callback is None else [f"lightning_bayes.{callback}"]
        assert [path.removesuffix(".from_preset") for path in ours][-1:] == expected, name
        assert callbacks[-1:] == ours[-1:] or not ours  # --trainer.callbacks.mc_samples=2 means the last in the list
        assert config["trainer"]["logger"]["init_args"]["name"] == name.replace("+", "_")


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_names_its_command(name):
    lines = recipes()[name].read_text("utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1] == f"#   lightning-bayes fit --config {name}"


@pytest.mark.parametrize("kind", ["data", "models", "methods"])
def test_a_part_begins_with_its_description(kind):
    assert all(path.read_text("utf-8").startswith("# ") for path in parts(kind).values())
