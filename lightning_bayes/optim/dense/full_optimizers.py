"""Full-covariance optimizers for small models: `FullVON`, `VONG`, `NNGFull`, around `optim.dense.full_gaussian`.

They differ in Ĥ: the exact Hessian; the mean of g_i g_iᵀ with the labels of the data; and with labels that the model draws.
A D × D matrix is kept, factorised for every pass and every update, so D is hundreds or a few thousands.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Likelihood, LossReduction
from lightning_bayes.curvature.hessian import HessianCapture, HessianEngine
from lightning_bayes.curvature.joint import LayerRows
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.dense.full_gaussian import FullState, outer_products, sample, update
from lightning_bayes.optim.dense.joint import JointOptimizer
from lightning_bayes.optim.dense.joint_rows import RowsOptimizer
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer
from lightning_bayes.optim.runtime.parameters import trainable
from lightning_bayes.optim.runtime.passes import FinishedPass, Measurement
from lightning_bayes.posteriors import FullGaussian, check_full_size, initial_curvature
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB


class FullOptimizer(JointOptimizer, ABC):
    """Keeps S over all weights; arguments as in `JointOptimizer`."""

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params, strict=True)]

    @property
    def _kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = self.state[self._params[0]]
        return kept

    def _has_curvature(self) -> bool:
        if "joint_curvature" not in self._kept and self._group["init_precision"] is not None:
            start = initial_curvature(self._group["init_precision"], **self._effective().precision_arguments)
            mean = self._flat(list(self._params))
            self._kept["joint_curvature"] = start * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        return "joint_curvature" in self._kept

    def _state_now(self) -> FullState:
        momenta = [self._momentum(param) for param in self._params]
        return FullState(self._flat(list(self._params)), self._kept["joint_curvature"], self._flat(momenta))

    def _draw(self, noise: list[Tensor]) -> list[Tensor]:
        now = self._effective()
        drawn = sample(
            self._state_now(),
            self._flat(noise),
            num_data=now.num_data,
            prior=now.prior,
            kl_weight=now.kl_weight,
            damping=now.noise_damping,
        )
        return self._parts(drawn)

    def _update_all(self, measurement: Measurement) -> None:
        now = self._effective()
        (measured,) = measurement.curvature.values()
        if not self._has_curvature():
            self._kept["joint_curvature"] = measured
        new = update(
            self._state_now(),
            self._flat([param.grad for param in self._params if param.grad is not None]),
            measured,
            lr=self._group["lr"],
            betas=self._group["betas"],
            prior=now.prior,
            damping=now.damping,
            step=self._group["step"] + 1,
        )
        self._kept["joint_curvature"] = new.curvature
        self._move_to(self._parts(new.mean), self._parts(new.momentum))

    @torch.no_grad()
    def posterior(self) -> FullGaussian:
        """The posterior by the model's parameter names.

        Returns:
            Copies of mean and precision; frozen parameters and buffers are among the constants.

        Raises:
            PosteriorError: If nothing was measured yet.
        """
        if not self._has_curvature():
            raise PosteriorError(f"{type(self).__name__} has no posterior before its first update, or init_precision.")
        now, curvature = self._effective(), self._kept["joint_curvature"]
        shift = now.noise_damping + now.prior
        identity = torch.eye(len(curvature), dtype=curvature.dtype, device=curvature.device)
        names = {param: name for name, param in self.model.named_parameters()}
        return FullGaussian(
            {names[param]: param.detach().clone() for param in self._params},
            (curvature + shift * identity) * now.scale,
            {names[param]: self._group["prior_precision"] for param in self._params},
            self._group["num_data"],
            self._constants(),
        )


@final
class FullVON(FullOptimizer):
    """Variational online Newton with the full Hessian (Khan et al. 2018, eqs. 7-9), as a `torch.optim.Optimizer`.

    The Hessian takes one backward pass for each weight. It may have negative eigenvalues, for which there is no posterior:
    the error then asks for a larger ``prior_precision``, or ``damping`` with ``damping_in_noise=True``. With
    ``betas=(0, 1 - lr)`` it is CVI.

    Args:
        model: Any model that torch can differentiate twice.
        limit_mib: Memory in MiB that one D × D matrix may take.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
        **arguments: See `JointOptimizer`.

    Example:
        >>> model, x, y = nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = FullVON(model, lr=1.0, betas=(0.0, 0.0), num_data=4)
        >>> with opt.sampled_params():
        ...     nn.functional.mse_loss(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior().precision.shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        loss_reduction: LossReduction = "auto",
        **arguments: Any,
    ) -> None:
        check_full_size({n: p for n, p in model.named_parameters() if p.requires_grad}, limit_mib)
        params = trainable(model)
        super().__init__(model, HessianEngine(model, params, loss_reduction), params, **arguments)

    def _moments(self, finished: FinishedPass) -> list[Tensor]:
        assert isinstance(finished.captured, HessianCapture)
        return [finished.captured.mean_hessian() / finished.loss_scale]


class OuterProductOptimizer(RowsOptimizer, FullOptimizer, ABC):
    """Ĥ is the mean of g_i g_iᵀ.

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Memory in MiB that one D × D matrix may take.
        likelihood: Of the model's outputs, for drawn labels; None looks for the model's attribute ``likelihood``.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
        **arguments: See `JointOptimizer`.
    """

    labels: FisherName

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        likelihood: Likelihood | None = None,
        loss_reduction: LossReduction = "auto",
        **arguments: Any,
    ) -> None:
        check_full_size({n: p for n, p in model.named_parameters() if p.requires_grad}, limit_mib)
        super().__init__(model, fisher=self.labels, likelihood=likelihood, loss_reduction=loss_reduction, **arguments)

    def _moments(self, finished: FinishedPass) -> list[Tensor]:
        of_param: dict[nn.Parameter, Tensor] = {}
        for layer, rows in zip(self._layers, self._layer_rows(finished.captured), strict=True):
            of_param |= _example_gradients(layer, rows)
        return [outer_products(torch.cat([of_param[param] for param in self._params], 1))]


def _example_gradients(layer: MatrixLayer, rows: LayerRows) -> dict[nn.Parameter, Tensor]:
    """Every example's gradient of a layer's parameters, ``[B, numel]``."""
    grads = rows.example_gradients()
    if not layer.has_bias:
        return {layer.weight: grads.flatten(1)}
    return {layer.weight: grads[..., :-1].flatten(1), layer.params[1]: grads[..., -1]}


@final
class VONG(OuterProductOptimizer):
    """Variational online Gauss-Newton with the full empirical Fisher (Khan et al. 2017, https://arxiv.org/abs/1712.01038).

    Arguments as in `OuterProductOptimizer`; the labels are those of the data.
    """

    labels: FisherName = "empirical"


@final
class NNGFull(OuterProductOptimizer):
    """Noisy natural gradient with the full Fisher (NNG-full, Zhang et al. 2018, eqs. 9-10, https://arxiv.org/abs/1712.02390).

    Arguments as in `OuterProductOptimizer`; the labels are drawn from the model's likelihood.
    """

    labels: FisherName = "sampled"
