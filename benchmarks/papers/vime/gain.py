"""The information gain of one transition, Zhang et al. 2018, eqs. 28-32, to leading order in the step α.

A natural-gradient step from q = N(vec W; vec M, Σ₁ ⊗ Σ₂) on the ELBO of one transition, with q as the prior, changes

    M by α Σ₁ G Σ₂        Σ₁ by α (2/n) Σ₁ ∇₁ Σ₁        Σ₂ by α (2/m) Σ₂ ∇₂ Σ₂        W is [m, n]

so the divergence of the new posterior from q is, for each layer,

    KL = ½ α² [ ⟨G, Σ₁ G Σ₂⟩ + (2/n) ⟨∇₁, Σ₁ ∇₁ Σ₁⟩ + (2/m) ⟨∇₂, Σ₂ ∇₂ Σ₂⟩ ]

where ∇₁ and ∇₂ are gradients with respect to Σ₁ and Σ₂. Eqs. 31 and 32 print Σ⁻¹ for Σ, which is correct for gradients with
respect to the precisions. As in the paper, the steps of the two covariances are independent (block F of eq. 29 is omitted).

For one transition, G = d aᵀ with the layer's input a and the gradient d with respect to its output. The Hessian is S ⊗ a aᵀ
in the Gauss-Newton approximation, with S = Jᵀ Λ J, where J is the Jacobian of the network's outputs with respect to the
layer's output and Λ the precision of the likelihood. The gradient of the ELBO with respect to the covariance is -½ times
the Hessian:

    ∇₁ = -½ S (aᵀΣ₂a)        ∇₂ = -½ a aᵀ tr(SΣ₁)

and

    KL = ½ α² [ (dᵀΣ₁d) v + ½ v² (tr(SΣ₁SΣ₁)/n + tr(SΣ₁)²/m) ]        v = aᵀΣ₂a

Likewise, a mean-field layer with variances V has KL = ½ α² [ (d²)ᵀ V a² + ½ Σ_ij (V_ij S_ii a_j²)² ].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerPass(NamedTuple):
    """The pass of B transitions through one layer."""

    inputs: Tensor  # a, with a 1 for the bias, [B, n]
    grads: Tensor  # d, gradients of log p with respect to the layer's output, [B, m]
    roots: Tensor  # Λ^½ J, [B, outputs, m]: S is rootsᵀ roots


def matrix_gain(layer_pass: LayerPass, left: Tensor, right: Tensor, step: float) -> Tensor:
    """The gain of a matrix-variate layer with covariances Σ₁ and Σ₂ in nats, ``[B]``."""
    a, d, roots = layer_pass
    width = (a @ right * a).sum(-1)  # aᵀΣ₂a
    inner = roots @ left @ roots.mT  # Λ^½ J Σ₁ Jᵀ Λ^½, whose trace is tr(SΣ₁)
    of_mean = (d @ left * d).sum(-1) * width
    traces = inner.square().sum((-2, -1)) / len(right) + inner.diagonal(dim1=-2, dim2=-1).sum(-1).square() / len(left)
    return 0.5 * step**2 * (of_mean + 0.5 * width.square() * traces)


def diagonal_gain(layer_pass: LayerPass, variance: Tensor, step: float) -> Tensor:
    """The gain of a mean-field layer with variances V in nats, ``[B]``."""
    squares, of_outputs = layer_pass.inputs.square(), layer_pass.roots.square().sum(-2)  # a², and S_ii
    of_mean = (layer_pass.grads.square() @ variance * squares).sum(-1)
    of_variance = (of_outputs.square() @ variance.square() * squares.square()).sum(-1)
    return 0.5 * step**2 * (of_mean + 0.5 * of_variance)
