"""Published weights and their download cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import WeightsError
from lightning_bayes.zoo.transforms import ImageTransform


class PublishedWeights(NamedTuple):
    """Weights with their input transform.

    Attributes:
        state: Tensors by name.
        transform: The input transform; None if unknown.
        source: Origin of the weights, for messages.
    """

    state: dict[str, Tensor]
    transform: ImageTransform | None
    source: str


def fetch(url: str) -> Path:
    """The path of a URL in torch.hub's cache. Downloads the file if needed; raises WeightsError if that fails."""
    name = os.path.basename(url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", name)  # such as f37072fd in resnet18-f37072fd.pth
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest and digest[1])
    except (OSError, RuntimeError) as error:  # no network, no write permission, or a hash mismatch
        raise WeightsError(
            f"{url} could not be downloaded ({error}). Without network access, download it elsewhere and copy it to {path}, "
            f"or pass the path of the file: pretrained='.../{name}'."
        ) from error
    return path
