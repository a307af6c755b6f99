"""One small exception tree: every error of this package is a `BayesError`.

Each message names the culprit, shows the value and offers the next step.
"""

from __future__ import annotations


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
