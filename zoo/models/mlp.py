"""Multi-layer perceptron, the network of the UCI regression and logistic-regression experiments.

The default, one hidden layer of 50 ReLU units, follows Hernández-Lobato & Adams 2015 (https://arxiv.org/abs/1502.05336).
Without hidden layers, the model is linear, as in logistic regression.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Literal, final

from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.registry import register_model

_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


@final
class MLP(nn.Module):
    """Fully connected network that flattens its input and has no activation after the last layer.

    Args:
        in_features: Number of input features after flattening.
        out_features: Number of outputs: classes, or 1 for regression.
        hidden: Widths of the hidden layers in order; empty for a linear model.
        activation: Non-linearity after each hidden layer.

    Raises:
        HyperparameterError: If a width is not positive or the activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: tuple[int, ...] = (50,),
        activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu",
    ) -> None:
        widths = [in_features, *hidden, out_features]
        if min(widths) < 1:
            raise HyperparameterError(f"MLP got the layer widths {widths}; each must be at least 1.")
        if activation not in _ACTIVATIONS:
            raise HyperparameterError(f"MLP got activation={activation!r}; choose one of {', '.join(_ACTIVATIONS)}.")
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise([in_features, *hidden]):
            layers += [nn.Linear(width_in, width_out), _ACTIVATIONS[activation]()]
        layers.append(nn.Linear(widths[-2], out_features))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits or means ``[batch, out_features]`` of inputs ``[batch, ...]`` with ``in_features`` values per example."""
        outputs: Tensor = self.layers(inputs)
        return outputs


@register_model("mlp")
def mlp_for_images(
    num_classes: int,
    in_channels: int,
    image_size: int = 28,
    hidden: tuple[int, ...] = (100, 100),
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu",
) -> MLP:
    """An `MLP` for square images of ``image_size`` pixels; see `MLP` for the other arguments."""
    return MLP(in_channels * image_size**2, num_classes, hidden, activation)
