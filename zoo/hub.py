"""Posterior files on the Hugging Face Hub: one repository per file, with the model card as its README.

The functions use the official ``huggingface_hub`` client, including its login, cache and offline mode.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from lightning_bayes.zoo.posterior_file import card_of
from lightning_bayes.zoo.posterior_folder import find_posterior

HUB_FILE: Final = "posterior.safetensors"
_METADATA: Final = """---
library_name: lightning-bayes
tags:
- bayesian
- uncertainty
---

"""


def push_to_hub(
    path: str | os.PathLike[str], repo_id: str, *, private: bool = False, revision: str | None = None
) -> str:
    """Upload a posterior file and its model card.

    Args:
        path: A file written by `save_posterior`, or its name. The model card must be next to the file.
        repo_id: ``"user/name"``; a missing repository is created.
        private: Whether a new repository is private.
        revision: The branch; None means the main branch.

    Returns:
        The URL of the repository.
    """
    file = find_posterior(path)
    api = _client().HfApi()
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_file(path_or_fileobj=_card(file, repo_id), path_in_repo="README.md", repo_id=repo_id, revision=revision)
    api.upload_file(path_or_fileobj=str(file), path_in_repo=HUB_FILE, repo_id=repo_id, revision=revision)
    return str(url)


def from_hub(repo_id: str, *, revision: str | None = None) -> Path:
    """Download a posterior file into the cache of the Hub client.

    Predict with ``Predictor.load(from_hub("user/name"))``.

    Args:
        repo_id: ``"user/name"``.
        revision: A branch, tag or commit; None means the main branch. Pin a commit to keep a file that you have checked.

    Returns:
        The path of the file, for `lightning_bayes.zoo.load`, which runs no code from the file.
    """
    return Path(_client().hf_hub_download(repo_id, HUB_FILE, revision=revision))


def _card(file: Path, repo_id: str) -> bytes:
    """The model card with the Hub's metadata; its example loads the file by the repository name."""
    card = card_of(file)
    text = card.read_text("utf-8") if card.is_file() else f"# {file.name}\n"
    text = text.replace(f'Predictor.load("{file.name}"', f'Predictor.load(zoo.from_hub("{repo_id}")')
    text = text.replace("from lightning_bayes import Predictor\n", "from lightning_bayes import Predictor, zoo\n")
    return (_METADATA + text.replace(file.name, HUB_FILE)).encode()


def _client() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'The Hub needs huggingface_hub, which is not installed. Run: pip install "lightning-bayes[hub]"'
        ) from error
    return huggingface_hub
