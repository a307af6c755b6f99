"""What the papers print for CIFAR-10.

Osawa et al. 2019 (https://arxiv.org/abs/1906.02506), Table 1: validation accuracy, NLL in nats, ECE and AUROC, which is most
likely that of misclassification; none has a standard error. Zhang et al. 2018 (https://arxiv.org/abs/1712.02390), Table 2:
accuracy alone, of VGG16 with half the filters and BatchNorm.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """One line of a table; None where the paper is silent."""

    method: str
    accuracy: float
    nll: float | None = None
    ece: float | None = None
    auroc: float | None = None
    epochs: int | None = None
    source: str = "Osawa et al."


def _zhang(method: str, accuracy: float) -> Row:
    return Row(method, accuracy, source="Zhang et al.")


# By model and by whether the training images are augmented.
PUBLISHED: Final[dict[tuple[str, bool], tuple[Row, ...]]] = {
    ("lenet", False): (
        Row("adam", 0.6767, 0.937, 0.021, 0.794, 210),
        Row("bbb", 0.6461, 1.018, 0.045, 0.784, 800),
        Row("mc_dropout", 0.6765, 0.99, 0.087, 0.797, 210),
        Row("vogn", 0.6732, 0.938, 0.046, 0.800, 210),
    ),
    ("alexnet", False): (
        Row("adam", 0.6794, 2.83, 0.262, 0.793, 161),
        Row("mc_dropout", 0.7220, 1.077, 0.140, 0.818, 160),
        Row("vogn", 0.6903, 0.93, 0.024, 0.796, 160),
    ),
    ("alexnet", True): (
        Row("adam", 0.7359, 1.48, 0.262, 0.793, 161),
        Row("mc_dropout", 0.7704, 0.667, 0.114, 0.828, 160),
        Row("vogn", 0.7548, 0.703, 0.016, 0.832, 160),
    ),
    ("resnet18", True): (
        Row("adam", 0.8600, 0.55, 0.082, 0.877, 160),
        Row("mc_dropout", 0.8285, 0.51, 0.166, 0.768, 161),
        Row("vogn", 0.8427, 0.477, 0.040, 0.876, 161),
    ),
    ("vgg16", False): (_zhang("sgd", 0.8575), _zhang("noisy_kfac", 0.8822)),
    ("vgg16", True): (_zhang("sgd", 0.9139), _zhang("noisy_kfac", 0.9201)),
}
