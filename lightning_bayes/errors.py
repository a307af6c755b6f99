"""One small exception tree: every error of this package is a `BayesError`.

Each message names the culprit, shows the value and offers the next step.
"""

from __future__ import annotations

from collections.abc import Iterable


def name_some(names: Iterable[str], characters: int = 240) -> str:
    """Join names for a message, as many as are read.

    Args:
        names: All that the message is about.
        characters: Room for them. The first name is always given.

    Returns:
        The names, and how many more there are.

    Example:
        >>> name_some(["fc1.weight", "fc1.bias"])
        'fc1.weight, fc1.bias'
        >>> name_some((f"layer{i}" for i in range(100)), characters=20)
        'layer0, layer1 and 98 more'
    """
    listed = list(names)
    kept = listed[:1]
    for name in listed[1:]:
        if len(", ".join([*kept, name])) > characters:
            break
        kept.append(name)
    more = len(listed) - len(kept)
    return ", ".join(kept) + (f" and {more} more" if more else "")


class BayesError(Exception):
    """Base of all errors raised by lightning_bayes."""


class HyperparameterError(BayesError, ValueError):
    """A hyperparameter lies outside of its range."""


class ShapeError(BayesError, ValueError):
    """A tensor does not have the documented shape."""


class UnsupportedLayerError(BayesError):
    """A parameter lies where no curvature rule reaches it."""


class ExampleDimensionError(BayesError):
    """A layer does not see the examples of the batch in the dimension where its rule looks for them."""


class UnsupportedTrainingError(BayesError):
    """The training set-up (optimizer, strategy, precision, loop) cannot host a variational optimizer."""


class RankError(BayesError, RuntimeError):
    """Processes that train together disagree, or one of them is gone."""


class UnknownNumDataError(BayesError):
    """The number of training examples N cannot be inferred."""


class NonFiniteError(BayesError, ArithmeticError):
    """Too many updates in a row had a loss, gradient or curvature that is not finite."""


class NotPositiveDefiniteError(BayesError, ArithmeticError):
    """A matrix has no Cholesky factor, also with jitter."""


class NoMeasurementError(BayesError, RuntimeError):
    """A step was asked for without gradients measured before it."""


class PosteriorError(BayesError):
    """A checkpoint holds no posterior, or a posterior of another model."""


class CheckpointError(BayesError, OSError):
    """A checkpoint or another file of results cannot be written."""


class ConfigError(BayesError, ValueError):
    """There is no such config, or its parts do not fit together."""


class WeightsError(BayesError):
    """Weights do not fit the model, cannot be read without running code, or cannot be fetched."""


class DatasetError(BayesError, FileNotFoundError):
    """A data set is not where it was looked for."""


class DataError(BayesError, ValueError):
    """Data are damaged, or have other classes or labels than they should."""


class RunError(BayesError):
    """A folder holds no run, or one that cannot be read."""
