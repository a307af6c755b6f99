"""Published weights, and the cache that they are downloaded to."""

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
    """Weights with the input transform that belongs to them.

    Attributes:
        state: Tensors by name.
        transform: The input transform; None if not known.
        source: Where the weights come from, for messages.
    """

    state: dict[str, Tensor]
    transform: ImageTransform | None
    source: str


def fetch(url: str) -> Path:
    """The file of a URL in the cache of torch.hub, downloaded if it is not there.

    Args:
        url: Where it is published; a hash in its name (``-f37072fd.pth``) is checked after the download.

    Returns:
        The file.

    Raises:
        WeightsError: If it is not there and cannot be downloaded; names the file and its place.
    """
    name = os.path.basename(url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest and digest[1])
    except (OSError, RuntimeError) as error:  # no network, no place to write, or another hash
        raise WeightsError(
            f"{url} could not be fetched ({error}). Without network, fetch it elsewhere and put it in place as {path}, or "
            f"pass the path of the file: pretrained='.../{name}'."
        ) from error
    return path
