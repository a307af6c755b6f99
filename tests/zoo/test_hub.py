"""The Hub with a stub client that uses a folder. Calls must match the real client's signatures."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from posterior_around import mean_field_around

from lightning_bayes import Predictor, zoo
from lightning_bayes.zoo.hub import from_hub, push_to_hub

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub, the extra `hub`, is not installed")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stub's folder, with one subfolder per repository."""
    root, api, download = tmp_path / "hub", huggingface_hub.HfApi, huggingface_hub.hf_hub_download

    class Client:
        def create_repo(self, *arguments, **options):
            bound = inspect.signature(api.create_repo).bind(self, *arguments, **options).arguments
            place = root / bound["repo_id"]
            assert bound["exist_ok"] or not place.exists()
            place.mkdir(parents=True, exist_ok=True)
            (root / "private").write_text(str(bound["private"]))
            return f"https://hub.example/{bound['repo_id']}"

        def upload_file(self, *arguments, **options):
            bound = inspect.signature(api.upload_file).bind(self, *arguments, **options).arguments
            content, target = bound["path_or_fileobj"], root / bound["repo_id"] / bound["path_in_repo"]
            target.write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())

    def hf_hub_download(*arguments, **options):
        bound = inspect.signature(download).bind(*arguments, **options).arguments
        copy = tmp_path / "cache" / bound["filename"]
        copy.parent.mkdir(exist_ok=True)
        return shutil.copy(root / bound["repo_id"] / bound["filename"], copy)

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return root


@pytest.fixture
def file(tmp_path):
    model = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=2, hidden=())
    zoo.save_posterior(
        tmp_path / "tiny.safetensors", model, mean_field_around(model), link="classification", class_names=["no", "yes"]
    )
    return tmp_path / "tiny.safetensors"


def test_a_posterior_goes_to_the_hub_and_comes_back(hub, file):
    assert push_to_hub(file, "me/tiny") == "https://hub.example/me/tiny"
    push_to_hub(file, "me/tiny", private=True)  # again
    assert (hub / "private").read_text() == "True"
    x = torch.ones(2, 1, 2, 2)
    found, wanted = Predictor.load(from_hub("me/tiny"))(x), Predictor.load(file)(x)
    assert torch.equal(found.probs, wanted.probs)
    assert found.labels == wanted.labels


def test_the_card_is_the_readme_and_its_code_loads_from_the_hub(hub, file):
    push_to_hub(file, "me/tiny")
    page = (hub / "me/tiny" / "README.md").read_text("utf-8")
    assert page.startswith("---\nlibrary_name: lightning-bayes\n")
    assert "| Classes | no, yes |" in page
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert 'Predictor.load(zoo.from_hub("me/tiny"))' in code
    namespace = {"inputs": torch.ones(3, 1, 2, 2)}
    exec(code, namespace)
    assert namespace["prediction"].probs.shape == (3, 2)


def test_a_missing_client_names_the_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r'not installed\. Run: pip install "lightning-bayes\[hub\]"'):
        push_to_hub(file, "me/tiny")


def test_a_hub_that_cannot_be_reached_is_named(hub, file, monkeypatch):
    class ConnectError(Exception):
        pass

    def create_repo(self, *arguments, **options):
        raise ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    with pytest.raises(
        ConnectionError, match=r"The Hub cannot be reached \(Name or service .* Push .*tiny\.safetensors"
    ):
        push_to_hub(file, "me/tiny")
