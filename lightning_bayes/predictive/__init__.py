"""Predictions from a posterior, with their uncertainty."""

from lightning_bayes.likelihood import (
    LikelihoodName,
    LinkArgument,
    Moments,
    Observation,
    Observed,
    Prediction,
    Quantiles,
    as_dict,
    predictive_nll,
)
from lightning_bayes.likelihood.predictions import entropy, mutual_information
from lightning_bayes.predictive.calibration import Calibrated, Calibration, calibrate, choose_calibration
from lightning_bayes.predictive.closed_form import (
    ClosedFormSamples,
    Linearized,
    output_moments,
    predictive_samples,
    probit,
)
from lightning_bayes.predictive.dropout import DropoutSamples, dropout_layers
from lightning_bayes.predictive.exported import Exported, MonteCarloNetwork, export
from lightning_bayes.predictive.linearized import LinearizedSamples
from lightning_bayes.predictive.monte_carlo import mc_predict
from lightning_bayes.predictive.recalibration import RecalibratedSamples, recalibrate
from lightning_bayes.predictive.rejection import Rejector, check_threshold, fewest_rows
from lightning_bayes.predictive.samples import (
    MemberPosteriors,
    MemberSamples,
    NetworkSamples,
    PosteriorSamples,
    SampledModule,
    Samples,
    as_input,
    at_posterior_mean,
    check_fits,
    evaluation_mode,
    misfits,
)
from lightning_bayes.predictive.scores import (
    OOD_SCORES,
    energy_score,
    entropy_score,
    max_logit_score,
    max_probability_score,
    mutual_information_score,
    ood_scores,
)
from lightning_bayes.predictive.temperature import fit_temperature
from lightning_bayes.predictive.weights import temporary_weights

__all__ = [
    "OOD_SCORES",
    "Calibrated",
    "Calibration",
    "ClosedFormSamples",
    "DropoutSamples",
    "Exported",
    "LikelihoodName",
    "Linearized",
    "LinearizedSamples",
    "LinkArgument",
    "MemberPosteriors",
    "MemberSamples",
    "Moments",
    "MonteCarloNetwork",
    "NetworkSamples",
    "Observation",
    "Observed",
    "PosteriorSamples",
    "Prediction",
    "Quantiles",
    "RecalibratedSamples",
    "Rejector",
    "SampledModule",
    "Samples",
    "as_dict",
    "as_input",
    "at_posterior_mean",
    "calibrate",
    "check_fits",
    "check_threshold",
    "choose_calibration",
    "dropout_layers",
    "energy_score",
    "entropy",
    "entropy_score",
    "evaluation_mode",
    "export",
    "fewest_rows",
    "fit_temperature",
    "max_logit_score",
    "max_probability_score",
    "mc_predict",
    "misfits",
    "mutual_information",
    "mutual_information_score",
    "ood_scores",
    "output_moments",
    "predictive_nll",
    "predictive_samples",
    "probit",
    "recalibrate",
    "temporary_weights",
]
