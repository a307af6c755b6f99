"""VGG16 (Simonyan & Zisserman 2015, configuration D, https://arxiv.org/abs/1409.1556).

Thirteen 3 × 3 convolutions with bias and 64, 64, M, 128, 128, M, 256 × 3, M, 512 × 3, M, 512 × 3, M filters, where M is a
max-pool 2. An optional normalisation and a ReLU follow each convolution. Then

    32 × 32:    512 → classes
    224 × 224:  512 · 7 · 7 → 4096 → 4096 → classes with dropout, as in torchvision, whose published weights it can load

The default initialisation follows torchvision. The network of Zhang et al. 2018 (https://arxiv.org/abs/1712.02390) has
``width=0.5`` (half the filters), ``train_norm=False`` (scale 1 and shift 0 in BatchNorm) and ``init="xavier"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, Literal, final

from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.models.images import require_counts, require_images, require_size
from lightning_bayes.zoo.models.norms import NormName, make_norm
from lightning_bayes.zoo.registry import register_model

_STAGES: Final = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)  # each stage ends with a max-pool

_TIMM_LAYERS: Final = {  # timm's first two are convolutions, torchvision's are linear layers
    "pre_logits.fc1": "classifier.0",
    "pre_logits.fc2": "classifier.3",
    "head.fc": "classifier.6",
}


def from_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert timm's VGG16 weights to torchvision's layout."""
    renamed = {}
    for name, value in state.items():
        layer, _, parameter = name.rpartition(".")
        flat = value.flatten(1) if layer.startswith("pre_logits.") and value.ndim == 4 else value
        renamed[f"{_TIMM_LAYERS.get(layer, layer)}.{parameter}"] = flat
    return renamed


@register_model("vgg16")
@register_model("vgg16_bn", norm="batch")
@register_model("vgg16_half", norm="batch", width=0.5)
@register_model("vgg16_imagenet", torchvision="vgg16", from_timm=from_timm, image_size=224)
@register_model("vgg16_bn_imagenet", torchvision="vgg16_bn", from_timm=from_timm, image_size=224, norm="batch")
@final
class VGG16(nn.Module):
    """VGG16: images ``[batch, in_channels, image_size, image_size]`` to logits.

    Args:
        num_classes: Number of classes C; the output is ``[batch, C]``.
        in_channels: Number of image channels.
        image_size: 32 (one linear layer) or 224 (three linear layers).
        norm: Normalisation between each convolution and its ReLU, see `lightning_bayes.zoo.models.norms`.
        width: Multiplier of the numbers of filters: 1 for the standard network, 0.5 for Zhang et al.
        dropout: Dropout probability at the outputs of the two hidden linear layers of the 224 variant.
        train_norm: Whether to train the scale and shift of the normalisation. If False, they are frozen.
        init: Weight initialisation: ``"kaiming"`` as in torchvision, or ``"xavier"`` (uniform). Biases are zero.

    Raises:
        HyperparameterError: If ``width`` is too small for a single filter, or ``init`` is unknown.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        norm: NormName = "none",
        width: float = 1.0,
        dropout: float = 0.5,
        train_norm: bool = True,
        init: Literal["kaiming", "xavier"] = "kaiming",
    ) -> None:
        require_size("VGG16", image_size, (32, 224))
        require_counts("VGG16", num_classes, in_channels)
        if not round(64 * width) >= 1:
            raise HyperparameterError(f"VGG16 got width={width!r}, which leaves no filters. Use 1.0 or 0.5.")
        if init not in {"kaiming", "xavier"}:
            raise HyperparameterError(f"VGG16 got init={init!r}; use 'kaiming' or 'xavier'.")
        super().__init__()
        self.in_channels, self.image_size = in_channels, image_size
        self.features = nn.Sequential(*_feature_layers(in_channels, norm, width, train_norm))
        features = round(512 * width)
        if image_size == 32:
            self.classifier: nn.Module = nn.Linear(features, num_classes)
        else:
            self.classifier = _imagenet_classifier(features * 7 * 7, num_classes, dropout)
        self.apply(partial(_initialise_, xavier=init == "xavier"))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, image_size, image_size]``."""
        require_images(images, "VGG16", self.in_channels, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _feature_layers(in_channels: int, norm: NormName, width: float, train_norm: bool) -> Iterator[nn.Module]:
    channels = in_channels
    for stage in _STAGES:
        for standard in stage:
            filters = round(standard * width)
            yield nn.Conv2d(channels, filters, 3, padding=1)
            if norm != "none":  # an identity would shift the layer indices from torchvision's
                yield make_norm(norm, filters).requires_grad_(train_norm)
            yield nn.ReLU()
            channels = filters
        yield nn.MaxPool2d(2)


def _imagenet_classifier(features: int, num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, num_classes),
    )


def _initialise_(layer: nn.Module, xavier: bool) -> None:
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        return
    if xavier:
        nn.init.xavier_uniform_(layer.weight)
    elif isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    else:
        nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
