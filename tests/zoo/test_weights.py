"""Weights from files, dictionaries and publishers."""

from __future__ import annotations

import pickle
import re
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from tiny_training import assert_same_bits
from torch import nn

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo import create_model, input_transform
from lightning_bayes.zoo.models.vgg16 import from_timm
from lightning_bayes.zoo.sources import source_of
from lightning_bayes.zoo.weights import fetch, head_name, load_weights, read_weights


def network(classes=3, width=4):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {"state_dict": {f"model.{name}": value for name, value in state.items()}},
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {f"_orig_mod.model.{name}": value for name, value in state.items()},
    ],
    ids=["plain", "state_dict", "model", "Lightning", "DataParallel", "compiled task"],
)
def test_a_state_dict_is_found_inside_a_checkpoint(tmp_path, wrap):
    state = network().state_dict()
    torch.save(wrap(state), tmp_path / "weights.pt")
    assert_same_bits(read_weights(tmp_path / "weights.pt"), state)


def test_a_flipped_bit_is_found(tmp_path):
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    content = bytearray((tmp_path / "weights.pt").read_bytes())
    position = content.index(network().state_dict()["1.running_var"].numpy().tobytes())
    content[position] ^= 1
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(WeightsError, match=r"weights\.pt is damaged: the checksum of .* is wrong\. Download it again"):
        read_weights(tmp_path / "weights.pt")


def test_safetensors_are_read(tmp_path):
    state = network().state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    assert_same_bits(read_weights(tmp_path / "weights.safetensors"), state)


def test_the_old_format_of_torch_is_read(tmp_path):
    state = network().state_dict()
    torch.save(state, tmp_path / "weights.pth", _use_new_zipfile_serialization=False)
    assert_same_bits(read_weights(str(tmp_path / "weights.pth")), state)


class Harmful:
    def __reduce__(self):
        return (open, ("was_run", "w"))


@pytest.mark.parametrize(
    "save", [lambda x, path: torch.save(x, path), lambda x, path: path.write_bytes(pickle.dumps(x))]
)
@pytest.mark.parametrize("content", [Harmful(), network(), {"weight": Harmful()}], ids=["code", "module", "inside"])
def test_a_pickle_is_rejected_and_not_run(tmp_path, monkeypatch, save, content):
    monkeypatch.chdir(tmp_path)
    save(content, tmp_path / "model.pt")
    with pytest.raises(
        WeightsError, match=r"model\.pt cannot be read as plain tensors .*could run code.*state_dict\(\)"
    ):
        read_weights(tmp_path / "model.pt")
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_named(tmp_path, name, share):
    path = tmp_path / name
    torch.save(network().state_dict(), path) if name.endswith(".pt") else save_file(network().state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} cannot be read as plain tensors .*file is complete"):
        read_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"weight": torch.ones(1), "epoch": 3, "name": "a"},
            r"weights\.pt is not a state dict of tensors by name; other entries: epoch, name\.",
        ),
        (
            {0: torch.ones(1), "weight": torch.ones(1)},
            r"weights\.pt is not a state dict of tensors by name; other entries: 0\.",
        ),
        ([torch.ones(1)], r"weights\.pt is a list, not a state dict"),
        ({}, r"weights\.pt is a dict, not a state dict of tensors"),
        ({"state_dict": {}}, r"is a dict, not a state dict of tensors"),
    ],
)
def test_a_file_without_a_state_dict_is_rejected(tmp_path, content, message):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=message):
        read_weights(tmp_path / "weights.pt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WeightsError, match=rf"There is no weights file at {tmp_path}/nowhere\.pt"):
        read_weights(tmp_path / "nowhere.pt")


# -- fitting ----------------------------------------------------------------------------------------------------------


def test_all_mismatches_are_listed_and_nothing_is_loaded():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = dict(network().state_dict())
    del state["0.bias"]
    state["0.weight"] = torch.ones(4, 7)
    state["1.running_mean"] = torch.full((4,), torch.nan)
    state["9.weight"] = torch.ones(1)
    expected = (
        "weights.pt does not fit Sequential (missing: 0.bias; unexpected: 9.weight; wrong shape: 0.weight [4, 7] "
        "instead of [4, 2]; not finite: 1.running_mean). Build the model with"
    )
    with pytest.raises(WeightsError, match=re.escape(expected)):
        load_weights(model, state, "weights.pt")
    assert_same_bits(model.state_dict(), before)


def test_tensors_of_the_wrong_type_are_listed():
    state = network().state_dict()
    state["0.weight"] = state["0.weight"] + 1j
    state["0.bias"] = state["0.bias"].int()
    state["1.weight"] = state["1.weight"].to_sparse()
    state["1.bias"] = state["1.bias"].to("meta")
    state["3.bias"] = state["3.bias"].half()  # lower precision is allowed
    expected = "(wrong type: 0.weight complex64, 0.bias int32, 1.weight float32 sparse_coo, 1.bias float32 meta). Build"
    with pytest.raises(WeightsError, match=re.escape(expected)):
        load_weights(network(), state)


def test_a_head_of_other_classes_is_skipped_with_a_message(said):
    model, theirs = network(classes=3), network(classes=5).state_dict()
    head = model[3].weight.clone()
    load_weights(model, theirs)
    assert torch.equal(model[3].weight, head)
    assert_same_bits(model[:3].state_dict(), {name: v for name, v in theirs.items() if not name.startswith("3.")})
    assert "the head (3.bias, 3.weight) is not loaded" in said.text


def test_a_head_of_the_same_classes_is_loaded_unless_replaced():
    model, theirs = network(), network().state_dict()
    head = model[3].weight.clone()
    load_weights(model, theirs, replace_head=True)
    assert torch.equal(model[3].weight, head)
    assert torch.equal(model[0].weight, theirs["0.weight"])
    load_weights(model, theirs)
    assert_same_bits(model.state_dict(), theirs)


def test_replace_head_false_requires_the_same_classes():
    with pytest.raises(WeightsError, match=r"wrong shape: 3\.weight \[5, 4\] instead of \[3, 4\], 3\.bias \[5\]"):
        load_weights(network(classes=3), network(classes=5).state_dict(), replace_head=False)


@pytest.mark.parametrize("theirs", [network(classes=5, width=6), network(classes=3, width=6)], ids=["both", "width"])
def test_a_head_with_a_different_input_width_is_a_mismatch(theirs):
    with pytest.raises(WeightsError, match=r"3\.weight \[\d, 6\] instead of \[3, 4\]"):
        load_weights(network(classes=3, width=4), theirs.state_dict())


def test_batchnorm_counters_may_be_missing():
    model, theirs = network(), network().state_dict()
    load_weights(model, {name: value for name, value in theirs.items() if not name.endswith("num_batches_tracked")})
    assert torch.equal(model[0].weight, theirs["0.weight"])


@pytest.mark.parametrize(
    ("model", "head"),
    [(nn.Linear(2, 3), ("",)), (network(), ("3",)), (torchvision.models.get_model("resnet18", num_classes=3), ("fc",))],
    ids=["Linear", "Sequential", "ResNet"],
)
def test_the_head_is_the_last_linear_layer(model, head):
    assert head_name(model) == head


def test_timm_says_which_layer_is_the_head():
    model = timm.create_model("deit_tiny_distilled_patch16_224", embed_dim=12, depth=1, num_heads=3)
    assert head_name(model) == ("head", "head_dist")


def test_a_model_without_a_linear_layer_has_no_head():
    with pytest.raises(WeightsError, match="Sequential has no linear layer to use as its head"):
        head_name(nn.Sequential(nn.ReLU()))


# -- published --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty torch.hub cache and no network."""

    def no_network(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    return tmp_path / "checkpoints"


URLS = {
    "alexnet_imagenet": "alexnet-owt-7be5be79.pth",
    "resnet18_imagenet": "resnet18-f37072fd.pth",
    "vgg16_imagenet": "vgg16-397923af.pth",
    "vgg16_bn_imagenet": "vgg16_bn-6c64b313.pth",
}


@pytest.mark.parametrize("name", URLS)
def test_without_network_the_error_names_the_cache_file(hub, name):
    where = re.escape(f"copy it to {hub / URLS[name]}, or pass the path of the file: pretrained='.../{URLS[name]}'")
    with pytest.raises(WeightsError, match=rf"https://download\.pytorch\.org/models/{URLS[name]} could not.*{where}"):
        create_model(name, num_classes=1000, pretrained=True)


@pytest.mark.parametrize("model", ["resnet18_imagenet", "torchvision/resnet18"])
@pytest.mark.parametrize("name", ["IMAGENET1K_V1", "DEFAULT", True])
def test_a_cached_file_is_used(hub, name, model):
    hub.mkdir()
    theirs = torchvision.models.get_model("resnet18", num_classes=2).state_dict()
    torch.save(theirs, hub / URLS["resnet18_imagenet"])
    found = create_model(model, num_classes=2, pretrained=name)
    assert_same_bits(found.state_dict(), theirs)
    assert input_transform(found).image_size == 224


def test_a_download_is_cached(hub, monkeypatch):
    def download(url, path, hash_prefix):
        assert (url, hash_prefix) == ("https://example.org/net-0123abcd.pth", "0123abcd")
        torch.save(network().state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    path = fetch("https://example.org/net-0123abcd.pth")
    assert path == hub / "net-0123abcd.pth"
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)  # the second time nothing is downloaded
    assert fetch("https://example.org/net-0123abcd.pth") == path


def test_unknown_weights_are_rejected(hub):
    with pytest.raises(WeightsError, match=r"'IMAGENET22K' is neither a file .*: IMAGENET1K_V1, DEFAULT\. .*timm/"):
        create_model("resnet18_imagenet", pretrained="IMAGENET22K")


@pytest.mark.parametrize("name", ["resnet18", "lenet5"])
def test_small_image_variants_have_no_published_weights(name):
    with pytest.raises(
        WeightsError, match=rf"no published weights for {name}, only for alexnet_imagenet, resnet18_imagenet,"
    ):
        create_model(name, num_classes=1000, pretrained=True)


# -- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vgg16", "vgg16_bn", "resnet18"])
def test_a_model_of_timm_gets_torchvisions_names_and_shapes(name):
    with torch.device("meta"):
        ours, theirs = torchvision.models.get_model(name).state_dict(), from_timm(timm.create_model(name).state_dict())
    assert {name: value.shape for name, value in theirs.items()} == {name: value.shape for name, value in ours.items()}


@pytest.mark.slow
def test_timms_vgg_computes_the_same_under_torchvisions_names(generator):
    theirs = timm.create_model("vgg16").eval()
    ours = torchvision.models.get_model("vgg16").eval()
    ours.load_state_dict(from_timm(theirs.state_dict()))
    images = torch.randn(1, 3, 224, 224, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_timms_transform_equals_its_own_pipeline():
    model = timm.create_model("resnet18.a1_in1k")
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    source, name = source_of("timm/resnet18.a1_in1k")
    ours = source.transform(name, model)
    resize, crop, normalize = theirs.transforms[0], theirs.transforms[1], theirs.transforms[-1]
    assert (ours.resize, ours.image_size, ours.interpolation) == (resize.size, crop.size[0], resize.interpolation.value)
    torch.testing.assert_close(torch.tensor(ours.mean), normalize.mean.flatten())
    torch.testing.assert_close(torch.tensor(ours.std), normalize.std.flatten())


def test_without_network_the_error_names_timms_file(monkeypatch):
    def no_network(*args, **kwargs):
        raise FileNotFoundError("no route to host")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", no_network)
    expected = (
        r"timm's weights resnet18\.a1_in1k could .*huggingface\.co/timm/resnet18\.a1_in1k/resolve/main/model\.safe"
    )
    with pytest.raises(WeightsError, match=expected):
        create_model("timm/resnet18", pretrained="a1_in1k")


@pytest.mark.parametrize(("name", "pretrained"), [("resnet18.nope", None), ("resnet18", "nope")])
def test_an_unknown_timm_tag_lists_the_available_tags(name, pretrained):
    with pytest.raises(
        HyperparameterError, match=r"timm has no weights 'resnet18\.nope'\. Available weights: resnet18\.a1_in1k, "
    ):
        create_model(f"timm/{name}", pretrained=pretrained)
