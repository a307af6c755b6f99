"""Presets equal the papers' updates in the papers' units, and every preset trains."""

from __future__ import annotations

import math

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from tiny_training import EXAMPLES, Classifier, fit, loader

import lightning_bayes
from lightning_bayes import ExponentialSchedule, OGNCallback, VadamCallback, VOGNCallback
from lightning_bayes.callbacks.fit.presets import Preset, all_presets, presets_of
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.diagonal.vogn import update
from lightning_bayes.posteriors import precision

OSAWA = {  # lr, weight of the new curvature, prior variance, damping, augmentation: the numbers of the released files
    "osawa2019-cifar10-lenet": (1e-4, 0.999, 0.01, 1e-3, 1),
    "osawa2019-cifar10-alexnet": (1e-4, 0.999, 2, 1e-3, 10),
    "osawa2019-cifar10-resnet18": (1e-4, 0.999, 0.02, 1e-3, 10),
    "osawa2019-cifar10-vgg19": (1e-4, 0.999, 2, 1e-3, 10),
    "osawa2019-cifar100-alexnet": (1e-4, 0.999, 0.02, 1e-3, 10),
    "osawa2019-cifar100-resnet18": (1e-4, 0.999, 0.02, 1e-3, 10),
    "osawa2019-imagenet-resnet18": (1.6e-3, 0.9, 0.0075, 1e-4, 5),
}
N = 50_000
ALL = all_presets()


def ids(preset: Preset) -> str:
    return f"{preset.callback}-{preset.name}"


def build(preset: Preset, **overrides):
    return getattr(lightning_bayes, preset.callback).from_preset(preset.name, **overrides)


@pytest.mark.parametrize("name", OSAWA)
def test_the_update_is_that_of_the_released_code_in_its_own_units(name, generator):
    """Heavy-ball buffer, weight of the new curvature, prior variance and damping, transcribed from the equations."""
    lr, ema, variance, damping, augmentation = OSAWA[name]
    arguments = VOGNCallback.presets()[name].arguments
    l2 = 1 / (augmentation * N * variance)
    ours = {"prior": arguments["prior_precision"] / (arguments["data_augmentation_factor"] * N)}
    ours |= {key: arguments[key] for key in ("lr", "betas", "damping")}
    mean, buffer, curvature = torch.randn(3, 5, generator=generator, dtype=torch.float64).unbind()
    buffer, curvature = torch.zeros_like(buffer), curvature.square()
    momentum = torch.zeros_like(buffer)
    for step in range(1, 8):
        grad, square = torch.randn(2, 5, generator=generator, dtype=torch.float64).unbind()
        square = square.square()
        found = update(MeanFieldState(mean, curvature, momentum), grad, square, step=step, **ours)
        buffer = 0.9 * buffer + grad + l2 * mean
        curvature = ema * square + (1 - ema) * curvature
        change = -lr * buffer / (curvature + damping + l2)
        # Ours corrects the momentum's bias, see the presets' notes.
        torch.testing.assert_close((found.mean - mean) * (1 - 0.9**step), change)
        std = (1 / (augmentation * N * (curvature + damping + l2))).sqrt()
        counted = {"num_data": augmentation * N, "prior_precision": arguments["prior_precision"], "damping": damping}
        torch.testing.assert_close(precision(found.curvature.clone(), **counted).rsqrt(), std)
        mean, momentum = mean + change, found.momentum


@pytest.mark.parametrize("preset", [p for p in ALL if p.name in OSAWA and p.callback == "VOGNCallback"], ids=ids)
def test_their_noise_has_the_damping_and_their_processes_the_samples(preset):
    callback = build(preset)
    assert callback.group_defaults["damping_in_noise"] is True
    assert callback.group_defaults["step_rule"] == "natural"
    assert callback.group_defaults["relative_noise"] is None
    assert callback.mc_samples == {"lenet": 6, "alexnet": 3, "resnet18": 5, "vgg19": 5}.get(
        preset.name.removeprefix("osawa2019-cifar10-"), callback.mc_samples
    )


def test_examples_count_as_the_source_says_and_not_as_a_data_module_does():
    """Only Osawa et al. use ρ; Zhang et al. use another KL weight for augmented images."""
    stated = {("VOGNCallback", name): rho for name, (*_, rho) in OSAWA.items() if rho != 1}
    stated["NoisyKFACCallback", "osawa2019-imagenet-resnet18"] = 5
    found = {(preset.callback, preset.name): build(preset).group_defaults["data_augmentation_factor"] for preset in ALL}
    assert {key: rho for key, rho in found.items() if rho != 1} == stated


@pytest.mark.parametrize("name", ["khan2018-usps", "khan2018-breast-cancer"])
def test_vogn_1_is_the_released_matlab_code_in_its_own_units(name, generator):
    """Sums over the data, a precision that includes the prior, and an average with weight 0.1 for the new gradient."""
    arguments, prior = VOGNCallback.presets()[name].arguments, {"usps": 25.0, "breast-cancer": 1.0}[name[9:]]
    ours = {"lr": arguments["lr"], "betas": arguments["betas"], "prior": arguments["prior_precision"] / N}
    mean, square = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    state = MeanFieldState(mean, square.square(), torch.zeros_like(mean))
    total, average = N * state.curvature + prior, 0.0  # their precision and momentum
    for step in range(1, 8):
        grad, square = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        average = 0.9 * average + 0.1 * (N * grad + prior * state.mean)
        total = (1 - 5e-4) * total + 5e-4 * (N * square.square() + prior)
        mean = state.mean - 5e-4 / total * average / (1 - 0.9**step)
        state = update(state, grad, square.square(), step=step, **ours)
        torch.testing.assert_close(state.mean, mean)
        torch.testing.assert_close(N * state.curvature + prior, total)


@pytest.mark.parametrize(
    ("callback", "name"), [(VOGNCallback, "toy"), (VadamCallback, "usps"), (VadamCallback, "breast-cancer")]
)
def test_learning_rates_of_logistic_regression_decay_as_in_their_equation_104(callback, name):
    module, first = Classifier(), 0.1 if name == "toy" else 0.01
    trained = callback.from_preset(f"khan2018-{name}")
    fit(module, trained, max_epochs=None, max_steps=5)
    (group,) = trained.optimizer.param_groups
    assert group["lr"] == pytest.approx(first / (1 + group["posterior"]["step"] ** 0.55))
    assert group["posterior"]["betas"][0] == 0.9


def test_the_kl_weight_of_lenet_grows_from_a_tenth_over_thirty_epochs():
    options = VOGNCallback.from_preset("osawa2019-cifar10-lenet").group_defaults
    assert options["kl_warmup_init"] == 0.1
    assert options["kl_warmup_steps"] == pytest.approx(30 * N / 128, abs=1)


def test_the_first_precision_of_lenet_with_batchnorm_is_that_of_its_first_curvature():
    options = VOGNCallback.from_preset("osawa2019-cifar10-lenet-batchnorm").group_defaults
    assert options["init_precision"] == pytest.approx(N * 8e-3 + 1)


@pytest.mark.parametrize("preset", ALL, ids=ids)
def test_every_preset_trains(preset):
    whole = "all examples in one batch" in preset.setting
    callback, module = build(preset), Classifier()
    module.lightning_bayes_likelihood = Categorical()  # labels for the Fisher
    fit(module, callback, data=loader(EXAMPLES if whole else 8), max_epochs=None, max_steps=2)
    assert callback.optimizer.num_updates == 2
    assert all(param.isfinite().all() for param in callback.optimizer.model.parameters())


def test_names_are_unique_for_each_callback():
    pairs = [(preset.callback, preset.name) for preset in ALL]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("preset", ALL, ids=ids)
def test_every_preset_names_its_source_and_setting(preset):
    assert preset.source.startswith("https://")
    assert preset.setting
    assert all(not math.isnan(v) for v in preset.arguments.values() if isinstance(v, float))


PUBLISHED = {  # the papers' numbers, in this package's units by hand
    ("Vprop0Callback", "khan2017-a1a"): {"prior_precision": 2.8072, "scaling": "sum"},
    ("VadamCallback", "khan2018-uci-small"): {"lr": 0.01, "betas": (0.9, 0.99), "mc_samples": 10, "eval_samples": 100},
    ("NoisyKFACCallback", "zhang2018-cifar10-vgg16-augmented"): {
        "prior_precision": 1 / 0.1,
        "kl_weight": 0.1,
        "kl_clip": ExponentialSchedule(1e-3, 0.95, every=390),
        "inverse_interval": 200,
    },
    ("KFACCallback", "osawa2019-imagenet-resnet18"): {"lr": 0.016, "betas": (0.9, 0.0), "prior_precision": 128.1167},
    ("VOGNCallback", "eschenhagen2019-split-cifar"): {
        "prior_precision": 120.0,
        "init_precision": 4e3,
        "mc_samples": 10,
    },
    ("IVONCallback", "shen2024-imagenet-resnet50"): {
        "lr": 2.5,
        "num_data": 1_281_167,
        "prior_precision": 1_281_167 * 5e-5,
        "init_precision": 1_281_167 * (0.05 + 5e-5),
    },
}


@pytest.mark.parametrize(("key", "stated"), PUBLISHED.items(), ids=lambda value: "-".join(map(str, value))[:60])
def test_arguments_are_the_papers_numbers(key, stated):
    callback, name = key
    arguments = getattr(lightning_bayes, callback).presets()[name].arguments
    numbers = {name: value for name, value in stated.items() if isinstance(value, float)}
    assert {name: arguments[name] for name in numbers} == pytest.approx(numbers)
    assert {name: arguments[name] for name in stated if name not in numbers} == {
        name: value for name, value in stated.items() if name not in numbers
    }


def test_overrides_take_the_place_of_the_presets_arguments():
    name = "osawa2019-cifar10-resnet18"
    plain, other = VOGNCallback.from_preset(name), VOGNCallback.from_preset(name, mc_samples=1, num_data=7)
    assert (plain.mc_samples, other.mc_samples, other.num_data) == (5, 1, 7)
    assert other.lr == plain.lr == 1e-3
    assert other.group_defaults == plain.group_defaults


def test_an_unknown_name_lists_those_there_are_and_whose_the_others_are():
    with pytest.raises(HyperparameterError) as caught:
        VOGNCallback.from_preset("osawa2019-resnet50")
    text = str(caught.value)
    assert text.startswith("VOGNCallback has no preset 'osawa2019-resnet50'. VOGNCallback has ")
    assert all(name in text for name in presets_of("VOGNCallback"))
    for callback in {preset.callback for preset in ALL}:
        assert f"{callback} has {', '.join(presets_of(callback))}" in text


def test_a_callback_without_presets_says_so():
    assert OGNCallback.presets() == {}
    with pytest.raises(HyperparameterError, match=r"OGNCallback has none; .*VOGNCallback has .*khan2018-toy"):
        OGNCallback.from_preset("osawa2019-toy")


@pytest.mark.usefixtures("_seed_variables")
@pytest.mark.parametrize("overrides", [{}, {"mc_samples": 2}])
def test_a_config_names_a_preset_by_its_class_path(overrides, tmp_path, monkeypatch):
    """An ordinary LightningCLI; arguments other than the name go into dict_kwargs."""
    spec = {
        "class_path": "lightning_bayes.VOGNCallback.from_preset",
        "init_args": {"name": "osawa2019-cifar10-resnet18"},
    }
    if overrides:
        spec["dict_kwargs"] = overrides
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"seed_everything": 0, "trainer": {"accelerator": "cpu", "logger": False, "callbacks": [spec]}})
    )
    monkeypatch.setattr("sys.argv", ["theirs"])
    cli = LightningCLI(Configurable, save_config_callback=None, args=["--config", str(config)], run=False)
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, VOGNCallback)]
    assert callback.lr == 1e-3
    assert callback.group_defaults["betas"] == (0.9, 0.001)
    assert callback.mc_samples == overrides.get("mc_samples", 5)


class Configurable(Classifier):
    def __init__(self) -> None:
        super().__init__()
