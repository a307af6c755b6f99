"""Published results on CIFAR-10.

Osawa et al. 2019 (https://arxiv.org/abs/1906.02506), Table 1: validation accuracy, NLL in nats, ECE and an AUROC, most
likely of misclassification, all without standard errors. Zhang et al. 2018 (https://arxiv.org/abs/1712.02390), Table 2:
accuracy of VGG16 with half the filters; it has no results with BatchNorm for BBB and Noisy Adam.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """One line of a table, with the method's name in the paper; None for values that it does not report."""

    method: str
    accuracy: float
    nll: float | None = None
    ece: float | None = None
    auroc: float | None = None
    epochs: int | None = None
    source: str = "Osawa et al."


def _zhang(norm: str, *accuracies: float | None) -> tuple[Row, ...]:
    methods = ("SGD", "K-FAC", "BBB", "Noisy Adam", "Noisy K-FAC")
    pairs = zip(methods, accuracies, strict=True)
    return tuple(Row(method, value, source=f"Zhang et al., {norm}") for method, value in pairs if value is not None)


# By model and augmentation.
PUBLISHED: Final[dict[tuple[str, bool], tuple[Row, ...]]] = {
    ("lenet", False): (
        Row("Adam", 0.6767, 0.937, 0.021, 0.794, 210),
        Row("BBB", 0.6461, 1.018, 0.045, 0.784, 800),
        Row("MC-dropout", 0.6765, 0.99, 0.087, 0.797, 210),
        Row("VOGN", 0.6732, 0.938, 0.046, 0.800, 210),
    ),
    ("alexnet", False): (
        Row("Adam", 0.6794, 2.83, 0.262, 0.793, 161),
        Row("MC-dropout", 0.7220, 1.077, 0.140, 0.818, 160),
        Row("VOGN", 0.6903, 0.93, 0.024, 0.796, 160),
    ),
    ("alexnet", True): (
        Row("Adam", 0.7359, 1.48, 0.262, 0.793, 161),
        Row("MC-dropout", 0.7704, 0.667, 0.114, 0.828, 160),
        Row("VOGN", 0.7548, 0.703, 0.016, 0.832, 160),
    ),
    ("resnet18", True): (
        Row("Adam", 0.8600, 0.55, 0.082, 0.877, 160),
        Row("MC-dropout", 0.8285, 0.51, 0.166, 0.768, 161),
        Row("VOGN", 0.8427, 0.477, 0.040, 0.876, 161),
    ),
    ("vgg16", False): (
        *_zhang("no BatchNorm", 0.8179, 0.8239, 0.8282, 0.8268, 0.8552),
        *_zhang("BatchNorm", 0.8575, 0.8686, None, None, 0.8822),
    ),
    ("vgg16", True): (
        *_zhang("no BatchNorm", 0.8835, 0.8889, 0.8831, 0.8823, 0.8935),
        *_zhang("BatchNorm", 0.9139, 0.9213, None, None, 0.9201),
    ),
}
