"""Posterior files: round trip, model card, and rejected files."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re

import pytest
import torch
import torchvision
from of_classes import mc_predict, save_posterior
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_training import assert_same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback, load_posterior, zoo
from lightning_bayes.cli import composition
from lightning_bayes.errors import CheckpointError, HyperparameterError, PosteriorError
from lightning_bayes.posteriors import FullGaussian, LowRankGaussian, MatrixGaussian, MeanField, ScaledPosterior
from lightning_bayes.zoo import BayesClassifier, ImageTransform, create_model, hub
from lightning_bayes.zoo.posterior_file import read_content, to_bytes

TRANSFORM = ImageTransform(32, mean=(0.5,), std=(0.25,), resize=36)
EXTRAS = {
    "class_names": ["cat", "dog", "eel"],
    "metrics": {"test/cls/NLL": torch.tensor(0.25), "test/cls/Acc": 0.9},
    "config": {"trainer": {"max_epochs": 3, "callbacks": ["VOGNCallback"]}, "seed": 0},
}


def network():
    return create_model("vgg16", num_classes=3, in_channels=1, norm="batch", width=0.05)


def posterior_like(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = {name: torch.randn(p.shape, generator=generator) / 20 for name, p in model.named_parameters()}
    precision = {name: 100 + 1000 * torch.rand(p.shape, generator=generator) for name, p in mean.items()}
    constants = {name: value for name, value in model.state_dict().items() if name not in mean}
    return MeanField(mean, precision, dict.fromkeys(mean, 2.0), num_data=123, constants=constants)


@pytest.fixture
def saved(tmp_path):
    model = network()
    posterior = posterior_like(model)
    path = tmp_path / "cats.safetensors"
    card = save_posterior(path, model, posterior, transform=TRANSFORM, **EXTRAS)
    return path, card, model, posterior


# -- the round trip ---------------------------------------------------------------------------------------------------


def test_a_posterior_makes_the_round_trip(saved, generator):
    path, _, model, posterior = saved
    loaded = zoo.load(path)
    for part in ("mean", "precision", "constants"):
        assert_same_bits(getattr(loaded.posterior, part), getattr(posterior, part))
    assert (loaded.posterior.prior_precision, loaded.posterior.num_data) == (posterior.prior_precision, 123)
    assert (loaded.transform, loaded.class_names) == (TRANSFORM, ("cat", "dog", "eel"))
    assert loaded.metrics == {"test/cls/NLL": 0.25, "test/cls/Acc": 0.9}
    assert (loaded.config, loaded.temperature) == (EXTRAS["config"], 1.0)
    images = torch.randn(2, 1, 32, 32, generator=generator)
    ours, theirs = (
        mc_predict(m, q, images, samples=3) for m, q in [(loaded.model, loaded.posterior), (model, posterior)]
    )
    assert torch.equal(ours.sample_probs, theirs.sample_probs)


def test_the_model_is_at_the_mean_in_evaluation_mode(saved):
    path, _, _, posterior = saved
    loaded = zoo.load(str(path))
    assert_same_bits({name: p.detach() for name, p in loaded.model.named_parameters()}, posterior.mean)
    assert not loaded.model.training
    assert zoo.architecture(loaded.model) == zoo.architecture(network())
    assert zoo.input_transform(loaded.model) == TRANSFORM
    prediction = mc_predict(loaded.model, loaded.posterior, loaded.transform(torch.zeros(1, 12, 14)).unsqueeze(0))
    assert prediction.probs.shape == (1, 3)


def test_a_loaded_posterior_can_be_saved_again(saved, tmp_path):
    loaded = zoo.load(saved[0])
    save_posterior(tmp_path / "again.safetensors", loaded.model, loaded.posterior)
    again = zoo.load(tmp_path / "again.safetensors")
    assert_same_bits(again.posterior.mean, loaded.posterior.mean)
    assert (again.transform, again.class_names, again.metrics, again.config) == (TRANSFORM, loaded.class_names, {}, {})


def test_the_folder_of_a_file_is_created(tmp_path):
    model = network()
    card = save_posterior(tmp_path / "new" / "folder" / "q.safetensors", model, posterior_like(model))
    assert card.exists()
    loaded = zoo.load(tmp_path / "new" / "folder" / "q.safetensors")
    assert sorted(loaded.posterior.mean) == sorted(posterior_like(model).mean)


def test_on_a_full_disk_the_old_file_is_kept(saved, monkeypatch):
    path, model = saved[0], network()
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        CheckpointError, match=rf"posterior file {path} could not be written \(No space left on device\)"
    ):
        save_posterior(path, model, posterior_like(model, seed=1))
    assert path.read_bytes() == before


def test_other_families_make_the_round_trip(tmp_path, generator):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=(4,))
    mean = {name: p.detach() for name, p in model.named_parameters()}
    eye = {name: (torch.eye(len(p)), torch.eye(p.shape[1] + 1)) for name, p in mean.items() if p.ndim == 2}
    biases = {name: name.replace("weight", "bias") for name in eye}
    prior = dict.fromkeys(mean, 1.0)
    widths = {name: torch.ones_like(p) for name, p in mean.items()}
    columns = {name: torch.randn(3, *p.shape, generator=generator) for name, p in mean.items()}
    families = [
        LowRankGaussian(mean, widths, columns, dict.fromkeys(mean, math.nan), num_data=9),  # as of SWAG
        MatrixGaussian(mean, eye, biases, {}, prior, num_data=9),
        FullGaussian(mean, 4 * torch.eye(sum(p.numel() for p in mean.values())), prior, num_data=9),
    ]
    images = torch.randn(2, 1, 2, 2, generator=generator)
    for posterior in families:
        save_posterior(tmp_path / "small.safetensors", model, posterior)
        loaded = zoo.load(tmp_path / "small.safetensors")
        assert type(loaded.posterior) is type(posterior)
        ours, theirs = (mc_predict(m, q, images) for m, q in [(loaded.model, loaded.posterior), (model, posterior)])
        assert torch.equal(ours.sample_probs, theirs.sample_probs)


def test_a_per_weight_prior_makes_the_round_trip(tmp_path, generator):
    """A prior from continual learning: the loaded KL uses it, and the card states its range."""
    model = create_model("lenet5", num_classes=3, in_channels=1)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    delta = {name: 2 + 6 * torch.rand(p.shape, generator=generator) for name, p in mean.items()}
    delta["fc3.bias"] = torch.tensor([1.0, 9.0, 5.0])
    q = MeanField(mean, {name: 2 * d for name, d in delta.items()}, delta, 10, prior_mean=dict(mean))
    card = save_posterior(tmp_path / "second.safetensors", model, q)
    found = zoo.load(tmp_path / "second.safetensors").posterior
    assert_same_bits(found.prior_precision, delta)
    assert torch.equal(found.kl(), q.kl())
    expected = sum(d.numel() for d in delta.values()) * (0.5 - 1 + math.log(2)) / 2  # of N(μ, 1/2δ) from N(μ, 1/δ)
    assert float(q.kl()) == pytest.approx(expected, rel=1e-4)
    assert "| Prior precision | 1 to 9, per weight, centred at the posterior mean for 10 tensors |" in card.read_text(
        "utf-8"
    )


def test_the_transform_of_pretrained_weights_is_stored(tmp_path):
    weights = torchvision.models.get_model("resnet18", num_classes=2).state_dict()
    model = create_model("resnet18_imagenet", num_classes=2, pretrained=weights)
    save_posterior(tmp_path / "a.safetensors", model, posterior_like(model))
    assert zoo.load(tmp_path / "a.safetensors").transform == ImageTransform(224, resize=256)


def test_a_posterior_trained_by_a_callback_can_be_saved(tmp_path, quiet_trainer, generator):
    x, y = torch.randn(24, 1, 2, 2, generator=generator), torch.arange(24) % 3
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=(4,))
    task = BayesClassifier(model, num_classes=3)
    trainer = quiet_trainer(VOGNCallback(), max_epochs=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    trainer.fit(task, loader, loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    posterior = load_posterior(tmp_path / "last.ckpt")
    save_posterior(tmp_path / "kept.safetensors", model, posterior.select("model."))
    loaded = zoo.load(tmp_path / "kept.safetensors")
    assert torch.equal(
        mc_predict(loaded.model, loaded.posterior, x).sample_probs, mc_predict(task, posterior, x).sample_probs
    )


# -- the card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_a_file_stores_the_scale_and_its_predictive(tmp_path, scale):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=(4,))
    posterior, images = ScaledPosterior(posterior_like(model), scale, linearized=True), torch.randn(5, 1, 2, 2)
    card = save_posterior(tmp_path / "wide.safetensors", model, posterior)
    found = zoo.load(tmp_path / "wide.safetensors")
    expected = mc_predict(model, posterior, images, linearized=True).probs
    assert torch.equal(mc_predict(found.model, found.posterior, images).probs, expected)
    assert f"| Width | {scale:g} × the MeanField width, for the linearised predictive |" in card.read_text("utf-8")


def test_the_card_describes_the_file(saved):
    _, card, model, _ = saved
    text = card.read_text("utf-8")
    assert card.name == "cats.md"
    for part in (
        "# cats.safetensors",
        "`create_model('vgg16', num_classes=3, in_channels=1, norm='batch', width=0.05)`",
        f"MeanField over {sum(p.numel() for p in model.parameters())} weights in {len(list(model.parameters()))} tensors",
        "| Training examples N | 123 |",
        "| Prior precision | 2, centred at zero |",
        "1 × 32 × 32 pixels, mean (0.5,), std (0.25,)",
        "| Classes | cat, dog, eel |",
        "| test/cls/NLL | 0.25 |",
    ):
        assert part in text
    assert json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]) == EXTRAS["config"]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("q.safetensors", "q.md"),
        ("q.pt", "q.md"),
        ("q.pth", "q.md"),
        ("q", "q.md"),
        ("v1.0", "v1.0.md"),
        ("v1.1", "v1.1.md"),
    ],
)
def test_the_card_is_named_after_its_file(tmp_path, name, card):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=())
    assert save_posterior(tmp_path / name, model, posterior_like(model)) == tmp_path / card
    assert zoo.load(tmp_path / name).posterior.num_data == 123


def test_a_posterior_file_cannot_end_in_md(tmp_path):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=())
    with pytest.raises(
        HyperparameterError, match=r"q\.md would be overwritten by its own model card\. .* as \.safetensors"
    ):
        save_posterior(tmp_path / "q.md", model, posterior_like(model))
    assert list(tmp_path.iterdir()) == []


def test_the_code_on_the_card_runs(saved, monkeypatch):
    path, card, *_ = saved
    monkeypatch.chdir(path.parent)
    code = re.search(r"```python\n(.*?)```", card.read_text("utf-8"), re.DOTALL)[1]
    namespace = {"image": torch.zeros(1, 12, 14, dtype=torch.uint8)}
    exec(code, namespace)
    assert namespace["prediction"].probs.shape == (1, 3)


def test_the_code_on_the_card_scales_by_the_temperature(saved, monkeypatch, generator):
    path, card, model, posterior = saved
    monkeypatch.chdir(path.parent)
    save_posterior(path, model, posterior, temperature=2.0)
    assert zoo.load(path).temperature == 2.0
    assert "| Temperature | 2, divides the logits |" in card.read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", card.read_text("utf-8"), re.DOTALL)[1]
    namespace = {"inputs": torch.randn(2, 1, 32, 32, generator=generator)}
    exec(code, namespace)
    expected = mc_predict(model, posterior, namespace["inputs"], temperature=2.0)
    torch.testing.assert_close(namespace["prediction"].probs, expected.probs)


# -- refused ----------------------------------------------------------------------------------------------------------


def rewritten(path, drop=(), **changes):
    """Rewrite a file with different contents and the right checksum."""
    content = {name: value for name, value in {**read_content(path, "cpu"), **changes}.items() if name not in drop}
    path.write_bytes(to_bytes(content))


def with_metadata(path, **changes):
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    save_file(load_file(path), path, metadata)


@pytest.mark.parametrize("version", ["1", "3", "two", ""])
def test_another_format_is_refused_in_one_sentence(saved, version):
    path, *_ = saved
    with_metadata(path, version=version)
    message = (
        rf"cats\.safetensors has format '{version}', but this version of lightning-bayes reads and writes '2'; write"
    )
    with pytest.raises(PosteriorError, match=message):
        zoo.load(path)


@pytest.mark.parametrize("family", ["NormalisingFlow", None])
def test_an_unknown_family_is_rejected(saved, family):
    path, *_ = saved
    rewritten(path, family=family)
    with pytest.raises(PosteriorError, match=rf"cats\.safetensors .* family {family}, but .* MeanField, .*Upgrade"):
        zoo.load(path)


def test_any_safetensors_reader_finds_the_tensors(saved):
    path, _, _, posterior = saved
    tensors = load_file(path)
    assert torch.equal(tensors["posterior.precision.classifier.bias"], posterior.precision["classifier.bias"])


def test_tuples_lists_and_shared_tensors_make_the_round_trip(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    content = {
        "factors": {"a": (weight, weight.T)},
        "list": [1, None, 0.1, {"b": weight[0]}],
        "bfloat16": weight.bfloat16(),
    }
    (tmp_path / "q").write_bytes(to_bytes(content))
    read = read_content(tmp_path / "q", "cpu")
    torch.testing.assert_close(read["factors"], content["factors"], rtol=0, atol=0)
    torch.testing.assert_close(read["bfloat16"], content["bfloat16"], rtol=0, atol=0)
    assert read["list"][:3] == [1, None, 0.1]
    assert torch.equal(read["list"][3]["b"], weight[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"posterior": {}}, "TypeError: "),
        ({"architecture": {"name": "vgg17", "arguments": {}}}, "HyperparameterError: There is no model 'vgg17'"),
        ({"transform": {"image_size": 32, "colour": 1}}, "TypeError: .*'colour'"),
        ({"metrics": None}, "AttributeError: "),
        ({"temperature": "x"}, "ValueError: "),
        ({"temperature": -1.0}, r"HyperparameterError: temperature=-1\.0 must be positive"),
        ({"class_names": ["cat"]}, "HyperparameterError: Got 1 class_names for a model with 3 classes"),
    ],
)
def test_damaged_content_names_the_file(saved, changes, reason):
    path, *_ = saved
    rewritten(path, **changes)
    with pytest.raises(
        PosteriorError, match=rf"cats\.safetensors cannot be read as .* \({reason}.*check that the file is compl"
    ):
        zoo.load(path)


@pytest.mark.parametrize("name", ["architecture", "transform", "class_names", "metrics", "config", "temperature"])
def test_missing_content_is_named(saved, name):
    path, *_ = saved
    rewritten(path, drop=[name])
    with pytest.raises(PosteriorError, match=rf"cats\.safetensors cannot be read as .*'{name}'"):
        zoo.load(path)


class Harmful:
    def __reduce__(self):
        return (open, ("was_run", "w"))


@pytest.mark.parametrize("write", [lambda x, p: torch.save(x, p), lambda x, p: p.write_bytes(pickle.dumps(x))])
def test_a_pickle_is_rejected_and_not_run(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    write({"format": "lightning_bayes.posterior", "config": Harmful()}, tmp_path / "model.pt")
    with pytest.raises(
        PosteriorError, match=r"model\.pt (is not a posterior file|cannot be read .*Pickles are rejected)"
    ):
        zoo.load(tmp_path / "model.pt")
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(saved, share):
    path, *_ = saved
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(PosteriorError, match=r"cats\.safetensors cannot be read .*check that the file is complete"):
        zoo.load(path)


@pytest.mark.parametrize("name", ["features.0.weight", "classifier.bias"])
def test_a_flipped_bit_is_found(saved, name):
    path, _, _, posterior = saved
    content = bytearray(path.read_bytes())
    content[content.index(posterior.precision[name].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(PosteriorError, match=r"cats\.safetensors is damaged: its checksum does not match\. Restore it"):
        zoo.load(path)


def test_a_flipped_bit_in_the_metadata_is_found(saved):
    path, *_ = saved
    content = path.read_bytes()
    assert content.count(b'\\"num_data\\": 123') == 1
    path.write_bytes(content.replace(b'\\"num_data\\": 123', b'\\"num_data\\": 133'))
    with pytest.raises(PosteriorError, match=r"cats\.safetensors is damaged: its checksum does not match"):
        zoo.load(path)


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1], {"weight": torch.ones(1)}], ids=str)
def test_other_files_get_a_hint(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(
        PosteriorError, match=r"other\.pt is not a posterior file\. .*with load_posterior, .*create_model"
    ):
        zoo.load(tmp_path / "other.pt")


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cats", "cats.safetensors", "animals/cats"])
def test_a_file_in_the_folder_is_found_by_name(saved, tmp_path, monkeypatch, name):
    monkeypatch.setenv("LIGHTNING_BAYES_HOME", str(tmp_path / "home"))
    file = (zoo.posterior_folder() / name).with_suffix(".safetensors")
    file.parent.mkdir(parents=True)
    saved[0].rename(file)
    assert zoo.load(name).class_names == ("cat", "dog", "eel")


def test_the_working_directory_comes_before_the_folder(saved, tmp_path, monkeypatch):
    path, _, model, posterior = saved
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("LIGHTNING_BAYES_HOME", str(tmp_path / "home"))
    save_posterior(zoo.posterior_folder() / "cats.safetensors", model, posterior)
    monkeypatch.chdir(path.parent)
    assert zoo.load("cats").class_names == ("cat", "dog", "eel")


def test_an_unknown_name_lists_the_names_in_the_folder(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_BAYES_HOME", str(saved[0].parent))
    folder = re.escape(str(saved[0].parent))
    message = rf"no posterior file dogs .*or in {folder}, which contains cats\. .*LIGHTNING_BAYES_HOME"
    with pytest.raises(FileNotFoundError, match=message):
        zoo.load("dogs")


def test_posteriors_of_the_package_are_found_by_name_and_listed_with_their_scores(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "PACKAGED", saved[0].parent)
    monkeypatch.chdir(tmp_path.parent)
    assert zoo.load("cats").class_names == ("cat", "dog", "eel")
    monkeypatch.setattr(composition, "_zoo", lambda folder: saved[0].parent)
    assert composition.packaged_posteriors() == {"cats": "test/cls/Acc 0.9, test/cls/NLL 0.25"}


def test_a_prior_at_the_mean_is_stored_once(tmp_path):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=(64,))
    at_zero = posterior_like(model)
    at_mean = MeanField(at_zero.mean, at_zero.precision, at_zero.prior_precision, 9, prior_mean=dict(at_zero.mean))
    sizes = []
    for posterior in (at_zero, at_mean):
        save_posterior(tmp_path / "q.safetensors", model, posterior)
        sizes.append((tmp_path / "q.safetensors").stat().st_size)
    assert sizes[1] - sizes[0] < 1000  # the weights take 2 kB
    assert_same_bits(zoo.load(tmp_path / "q.safetensors").posterior.prior_mean, at_zero.mean)


def test_without_a_variable_the_folder_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGHTNING_BAYES_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.posterior_folder() == tmp_path / ".cache" / "lightning_bayes"
    with pytest.raises(FileNotFoundError, match=r"which contains none\. Save one there with zoo\.save_posterior"):
        zoo.load("dogs")


def test_a_posterior_of_a_different_model_is_rejected(tmp_path):
    model = network()
    with pytest.raises(PosteriorError, match=r"The posterior does not fit this VGG16 .*posterior\.select\('model\.'\)"):
        save_posterior(tmp_path / "a.safetensors", model, posterior_like(nn.ModuleDict({"model": model})))
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_plain_are_listed(tmp_path):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=())
    config = {"data": {"root": tmp_path}, "sizes": [1, torch.ones(1)]}
    with pytest.raises(
        HyperparameterError, match=r"got config\.data\.root \(\w+Path\), config\.sizes\[1\] \(Tensor\)\. Convert"
    ):
        save_posterior(tmp_path / "a.safetensors", model, posterior_like(model), config=config)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_temperature_is_rejected(tmp_path, temperature):
    model = create_model("mlp", num_classes=3, in_channels=1, image_size=2, hidden=())
    with pytest.raises(HyperparameterError, match=rf"temperature={temperature} must be positive and finite"):
        save_posterior(tmp_path / "a.safetensors", model, posterior_like(model), temperature=temperature)
