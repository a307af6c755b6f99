"""Models by name, with random or pretrained weights, against torchvision's and timm's own models."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
import torchvision
import yaml

from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo import architecture, create_model, input_transform, list_models
from lightning_bayes.zoo.transforms import ImageTransform

SMALL = {"lenet5": 28, "mlp": 28, "alexnet": 32, "resnet18": 32, "vgg16_half": 32}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return torchvision.models.get_model("resnet18", num_classes=7).eval()


@pytest.fixture(scope="module")
def saved(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(theirs.state_dict(), path)
    return path


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_builds_for_any_number_of_classes_and_channels(name, channels):
    model = create_model(name, num_classes=4, in_channels=channels)
    assert model(torch.zeros(2, channels, SMALL[name], SMALL[name])).shape == (2, 4)


@pytest.mark.parametrize("name", list_models())
def test_every_listed_name_can_be_built(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=5)
    assert list(model.parameters())[-1].shape == (5,)
    assert input_transform(model) is None


@pytest.mark.parametrize("name", list_models("*_imagenet"))
def test_the_imagenet_names_are_torchvisions_architectures(name):
    with torch.device("meta"):
        ours = create_model(name, num_classes=1000).state_dict()
        theirs = torchvision.models.get_model(name.removesuffix("_imagenet")).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


def test_arguments_reach_the_class():
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=8, hidden=(5, 6), activation="tanh")
    assert [list(p.shape) for p in model.parameters()] == [[5, 64], [5], [6, 5], [6], [3, 6], [3]]
    assert create_model("resnet18", norm="group").bn1.num_groups == 32


def test_a_pattern_selects_names():
    assert list_models("vgg16*") == ["vgg16", "vgg16_bn", "vgg16_bn_imagenet", "vgg16_half", "vgg16_imagenet"]
    assert list_models() == sorted(list_models())
    assert "timm/resnet18" in list_models("timm/resnet*")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "resnet19",
            {},
            r"There is no model 'resnet19'\. Did you mean resnet18 .*\? Available models: alexnet, .*, timm/NAME and torch",
        ),
        ("lenet", {}, r"Did you mean lenet5[ ?]"),
        ("vgg", {}, r"Did you mean vgg16[ ?]"),
        (
            "lenet5",
            {"stem": "cifar", "width": 2},
            r"lenet5 does not accept stem, width\. Its arguments are image_size, norm",
        ),
        ("timm/resnet19", {}, r"timm has no model 'resnet19'\. Similar names: .*resnet.*zoo\.list_models"),
        ("torchvision/resnet19", {}, r"torchvision has no classifier 'resnet19'"),
        ("torchvision/resnet18", {"in_channels": 1}, r"torchvision/resnet18 requires in_channels=3"),
    ],
)
def test_unknown_names_and_arguments_are_rejected(name, arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        create_model(name, **arguments)


def test_a_model_stores_its_architecture():
    model = create_model("resnet18", num_classes=4, in_channels=1, norm="group")
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        name, arguments = architecture(same)
        assert (name, arguments) == ("resnet18", {"num_classes": 4, "in_channels": 1, "norm": "group"})
    create_model(name, **arguments).load_state_dict(model.state_dict())


def test_a_model_not_built_by_create_model_has_no_architecture():
    with pytest.raises(HyperparameterError, match=r"This Linear was not built by create_model\. Build it with zoo\."):
        architecture(torch.nn.Linear(2, 2))


def test_timm_models_are_built_by_name(generator):
    model = create_model("timm/resnet18", num_classes=4, in_channels=1).eval()
    reference = timm.create_model("resnet18", num_classes=4, in_chans=1).eval()
    reference.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 32, 32, generator=generator)
    with torch.no_grad():
        assert torch.equal(model(images), reference(images))


def test_torchvision_models_are_built_by_name(generator):
    model = create_model("torchvision/resnet18", num_classes=4).eval()
    reference = torchvision.models.resnet18(num_classes=4).eval()
    reference.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=generator)
    with torch.no_grad():
        assert torch.equal(model(images), reference(images))
    assert architecture(model).name == "torchvision/resnet18"
    assert "torchvision/resnet18" in list_models("torchvision/resnet*")


# -- pretrained -------------------------------------------------------------------------------------------------------


def test_a_state_dict_of_torchvision_makes_the_round_trip(theirs, saved, generator):
    model = create_model("resnet18_imagenet", num_classes=7, pretrained=saved).eval()
    images = torch.randn(2, 3, 64, 64, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images))
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())
    assert input_transform(model) == ImageTransform(224, resize=256)


@pytest.mark.parametrize("form", [str, lambda path: path, lambda path: torch.load(path, weights_only=True)])
def test_path_string_and_state_dict_are_equivalent(saved, theirs, form):
    model = create_model("resnet18_imagenet", num_classes=7, pretrained=form(saved))
    assert torch.equal(model.fc.weight, theirs.fc.weight)


@pytest.fixture
def timm_hub(monkeypatch):
    """A stub of timm's hub with random weights of a ResNet-18 for 1000 classes."""
    if not timm.models._hub.has_hf_hub():  # timm checks this first
        pytest.skip("timm finds no huggingface_hub that it can use")
    state = timm.create_model("resnet18").state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *args, **kwargs: dict(state))
    return state


@pytest.mark.parametrize(
    ("name", "pretrained"),
    [
        ("timm/resnet18", True),
        ("timm/resnet18", "a1_in1k"),
        ("timm/resnet18", "timm/resnet18.a1_in1k"),
        ("timm/resnet18.a2_in1k", "timm/resnet18.a1_in1k"),
        ("resnet18_imagenet", "timm/resnet18.a1_in1k"),
    ],
)
def test_timms_weights_are_loaded_without_their_head(timm_hub, name, pretrained):
    model = create_model(name, num_classes=3, pretrained=pretrained)
    assert model.fc.weight.shape == (3, 512)
    assert torch.equal(model.layer4[1].conv2.weight, timm_hub["layer4.1.conv2.weight"])
    assert input_transform(model).interpolation == "bicubic"


def test_timm_sums_the_channels_for_greyscale_images(timm_hub):
    model = create_model("timm/resnet18", num_classes=3, in_channels=1, pretrained=True)
    torch.testing.assert_close(model.conv1.weight, timm_hub["conv1.weight"].sum(1, keepdim=True))


def test_a_timm_model_reads_a_file_strictly(saved):
    model = create_model("timm/resnet18", num_classes=7, pretrained=saved)
    assert torch.equal(model.conv1.weight, torch.load(saved, weights_only=True)["conv1.weight"])
    with pytest.raises(WeightsError, match=r"does not fit ResNet \(missing: layer1\.2\.conv1\.weight"):
        create_model("timm/resnet34", num_classes=7, pretrained=saved)


# -- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def task_of(tmp_path, _seed_variables):
    """The model that a config and the command line build."""

    def build(model, *arguments):
        model["class_path"] = "lightning_bayes.zoo.create_model"
        task = {"class_path": "lightning_bayes.zoo.BayesClassifier", "init_args": {"num_classes": 3, "model": model}}
        config = {"seed_everything": 0, "model": task, "data": {"class_path": "lightning_bayes.zoo.DigitsDataModule"}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
        return instantiate(str(tmp_path / "config.yaml"), *quiet, *arguments).model

    return build


def test_a_config_names_a_model_and_its_weights(task_of, saved):
    arguments = {"name": "resnet18_imagenet", "num_classes": 3, "pretrained": str(saved)}
    built = task_of({"init_args": arguments, "dict_kwargs": {"norm": "batch"}}).model
    assert architecture(built) == ("resnet18_imagenet", {"num_classes": 3, "in_channels": 3, "norm": "batch"})
    assert torch.equal(built.conv1.weight, torch.load(saved, weights_only=True)["conv1.weight"])


def test_the_command_line_sets_arguments_of_the_model(task_of):
    task = task_of({"init_args": {"name": "lenet5"}}, "--model.num_classes=4", "--model.model.num_classes=4")
    assert (task.num_classes, architecture(task.model).arguments["num_classes"]) == (4, 4)
