"""The information gain of one transition, Zhang et al. 2018, eqs. 28-32, to leading order in the step α.

A natural-gradient step from q = N(vec W; vec M, Σ₁ ⊗ Σ₂) on the bound of one transition, with q as the prior, moves

    M by α Σ₁ G Σ₂        Σ₁ by α (2/n) Σ₁ ∇₁ Σ₁        Σ₂ by α (2/m) Σ₂ ∇₂ Σ₂        W is [m, n]

so that the new posterior's divergence from q is, for each layer,

    KL = ½ α² [ ⟨G, Σ₁ G Σ₂⟩ + (2/n) ⟨∇₁, Σ₁ ∇₁ Σ₁⟩ + (2/m) ⟨∇₂, Σ₂ ∇₂ Σ₂⟩ ]

where ∇₁ and ∇₂ are gradients in Σ₁ and Σ₂. Eqs. 31 and 32 print Σ⁻¹ for Σ, which belongs to gradients in the precisions. As
in the paper, the steps of the two covariances do not see each other (the block F of eq. 29 is left out).

Of one transition G = d aᵀ, with a the layer's input and d the gradient in its output, and the Hessian is S ⊗ a aᵀ in the
Gauss-Newton approximation. There S = Jᵀ Λ J, with J the Jacobian of the network's outputs in the layer's output and Λ the
precision of the likelihood. The bound's gradient in the covariance is -½ of that, so

    ∇₁ = -½ S (aᵀΣ₂a)        ∇₂ = -½ a aᵀ tr(SΣ₁)

and

    KL = ½ α² [ (dᵀΣ₁d) v + ½ v² (tr(SΣ₁SΣ₁)/n + tr(SΣ₁)²/m) ]        v = aᵀΣ₂a

A mean-field layer with the variances V has KL = ½ α² [ (d²)ᵀ V a² + ½ Σ_ij (V_ij S_ii a_j²)² ] in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerPass(NamedTuple):
    """What one layer has seen of each of B transitions."""

    inputs: Tensor  # a, with a 1 for the bias, [B, n]
    grads: Tensor  # d, of log p in the layer's output, [B, m]
    roots: Tensor  # Λ^½ J, [B, outputs, m]: S is rootsᵀ roots


def matrix_gain(seen: LayerPass, left: Tensor, right: Tensor, step: float) -> Tensor:
    """The gain under a matrix-variate layer.

    Args:
        seen: The transitions.
        left: Σ₁, ``[m, m]``.
        right: Σ₂, ``[n, n]``.
        step: α.

    Returns:
        KL in nats, ``[B]``, at least 0.
    """
    a, d, roots = seen
    width = (a @ right * a).sum(-1)  # aᵀΣ₂a
    inner = roots @ left @ roots.mT  # Λ^½ J Σ₁ Jᵀ Λ^½, whose trace is tr(SΣ₁)
    of_mean = (d @ left * d).sum(-1) * width
    traces = inner.square().sum((-2, -1)) / len(right) + inner.diagonal(dim1=-2, dim2=-1).sum(-1).square() / len(left)
    return 0.5 * step**2 * (of_mean + 0.5 * width.square() * traces)


def diagonal_gain(seen: LayerPass, variance: Tensor, step: float) -> Tensor:
    """The gain under a mean-field layer.

    Args:
        seen: The transitions.
        variance: V, ``[m, n]``.
        step: α.

    Returns:
        KL in nats, ``[B]``, at least 0.
    """
    squares, of_outputs = seen.inputs.square(), seen.roots.square().sum(-2)  # a², and S_ii
    of_mean = (seen.grads.square() @ variance * squares).sum(-1)
    of_variance = (of_outputs.square() @ variance.square() * squares.square()).sum(-1)
    return 0.5 * step**2 * (of_mean + 0.5 * of_variance)
