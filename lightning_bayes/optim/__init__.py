"""Variational optimizers: one algorithm per file, a pure `update` first, then the `torch.optim.Optimizer`."""

from lightning_bayes.optim.base import NoisyOptimizer
from lightning_bayes.optim.bbb import BBB
from lightning_bayes.optim.chain_optimizer import BlockTridiagonalKFAC
from lightning_bayes.optim.cvi import CVI
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.full_optimizers import VONG, FullVON, NNGFull
from lightning_bayes.optim.hyper import PriorMean
from lightning_bayes.optim.ivon import IVON
from lightning_bayes.optim.joint import JointOptimizer
from lightning_bayes.optim.kronecker import KFAC, KroneckerOptimizer, NoisyKFAC
from lightning_bayes.optim.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.momentum_von import MomentumVON
from lightning_bayes.optim.noise import CounterNoise, counter_seed
from lightning_bayes.optim.noisy_adam import NoisyAdam, NoisyAdamFisher
from lightning_bayes.optim.ogn import OGN
from lightning_bayes.optim.schedules import (
    BetaSchedule,
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    PiecewiseSchedule,
    Schedule,
    value_at,
)
from lightning_bayes.optim.state import MeanFieldState
from lightning_bayes.optim.vadagrad import VadaGrad
from lightning_bayes.optim.vadam import Vadam
from lightning_bayes.optim.vogn import VOGN
from lightning_bayes.optim.von import VON, Positivity, ReparameterisedVON, check_positivity
from lightning_bayes.optim.vprop import Vprop, Vprop0

__all__ = [
    "BBB",
    "CVI",
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "VON",
    "VONG",
    "BetaSchedule",
    "BlockTridiagonalKFAC",
    "CosineSchedule",
    "CounterNoise",
    "ExponentialSchedule",
    "FisherName",
    "FullVON",
    "JointOptimizer",
    "KroneckerOptimizer",
    "LinearSchedule",
    "MeanFieldOptimizer",
    "MeanFieldState",
    "MomentumVON",
    "NNGFull",
    "NoisyAdam",
    "NoisyAdamFisher",
    "NoisyKFAC",
    "NoisyOptimizer",
    "PiecewiseSchedule",
    "Positivity",
    "PriorMean",
    "ReparameterisedVON",
    "Schedule",
    "VadaGrad",
    "Vadam",
    "Vprop",
    "Vprop0",
    "check_positivity",
    "counter_seed",
    "value_at",
]
