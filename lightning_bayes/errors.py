"""The exceptions of this package; all derive from `BayesError`.

Each message names the culprit, shows the value and suggests the next step.
"""

from __future__ import annotations

from collections.abc import Iterable


def name_some(names: Iterable[str], characters: int = 240) -> str:
    """Names joined by commas, as many as fit, but at least one, and the number of the others."""
    all_names = list(names)
    listed = all_names[:1]
    for name in all_names[1:]:
        if len(", ".join([*listed, name])) > characters:
            break
        listed.append(name)
    omitted = len(all_names) - len(listed)
    return ", ".join(listed) + (f" and {omitted} more" if omitted else "")


class BayesError(Exception):
    """Base class of all errors raised by lightning_bayes."""


class HyperparameterError(BayesError, ValueError):
    """A hyperparameter is out of range."""


class ShapeError(BayesError, ValueError):
    """A tensor does not have the documented shape."""


class UnsupportedLayerError(BayesError):
    """No curvature rule covers a parameter."""


class ExampleDimensionError(BayesError):
    """A layer does not keep the examples in the batch dimension that its rule expects."""


class UnsupportedTrainingError(BayesError):
    """The training set-up (optimizer, strategy, precision, loop) does not support a variational optimizer."""


class RankError(BayesError, RuntimeError):
    """Distributed ranks have different settings."""


class UnknownNumDataError(BayesError):
    """The number of training examples N cannot be inferred."""


class NonFiniteError(BayesError, ArithmeticError):
    """Too many consecutive updates had a non-finite loss, gradient or curvature."""


class NotPositiveDefiniteError(BayesError, ArithmeticError):
    """A matrix has no Cholesky factor, even with jitter."""


class NoMeasurementError(BayesError, RuntimeError):
    """`step` was called before any gradient was measured."""


class PosteriorError(BayesError):
    """A posterior is invalid, missing from a checkpoint, or belongs to another model."""


class CheckpointError(BayesError, OSError):
    """A checkpoint or a results file cannot be written."""


class ConfigError(BayesError, ValueError):
    """A config does not exist, or its parts are incompatible."""


class WeightsError(BayesError):
    """Weights do not match the model, cannot be loaded without executing code, or cannot be downloaded."""


class DatasetError(BayesError, FileNotFoundError):
    """A data set was not found."""


class DataError(BayesError, ValueError):
    """Data are corrupt, or have unexpected classes or labels."""


class RunError(BayesError):
    """A folder contains no run, or an unreadable one."""
