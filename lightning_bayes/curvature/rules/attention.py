"""nn.MultiheadAttention: q = W_q x_q + b_q, likewise k and v, and o = W_o a + b_o with a = attention(q, k, v).

    c_i(W_q) = Σ_t δq_it x_qitᵀ        c_i(b_q) = Σ_t δq_it        likewise for k, v and o
    c_i(b_k⁺) = δk_i⁺                  for the position that ``add_bias_kv`` appends to keys and values

To get δq, δk and δv, torch's attention runs again with identity projections and with the random numbers of the forward, so
it applies the layer's masks and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_bayes.curvature.rules.linear import LinearMap, contributions_of, squares_of, sums_of
from lightning_bayes.curvature.rules.registry import ExampleDims, Inputs, PerExample, Squares, Sums, layer_rule
from lightning_bayes.curvature.workspace import Workspace


def _example_dims(layer: nn.MultiheadAttention, inputs: Inputs) -> ExampleDims:
    dim = 0 if layer.batch_first else 1
    return dim, dim, dim, 0  # the padding mask is always batch-first


def _draw(*sizes: tuple[int, int], dim: int = 0, **options: Any) -> Callable[[Generator], Inputs]:
    """Draw query, key and value by ``(length, features)``; a single pair makes all three the same tensor."""
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    defaults = dict(zip(names, (None, True, None, True, False), strict=True))

    def draw(generator: Generator) -> Inputs:
        drawn = [torch.randn(5, *size, generator=generator, dtype=torch.float64).transpose(0, dim) for size in sizes]
        return (*(drawn * (3 // len(drawn))), *(defaults | options).values())

    return draw


_PADDING = torch.arange(6) >= torch.tensor([6, 4, 6, 1, 3])[:, None]  # [B, S]
_CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)  # [T, S]


@layer_rule(
    nn.MultiheadAttention,
    parameters=(
        *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
        *("out_proj.weight", "out_proj.bias"),
    ),
    input_dims=3,
    example_dims=_example_dims,
    later_dims=(0,),  # of the attention weights
    repeats_noise=lambda layer: layer.training and layer.dropout > 0,
    cases=[
        (lambda: nn.MultiheadAttention(4, 2, batch_first=True), _draw((6, 4))),
        (lambda: nn.MultiheadAttention(4, 2), _draw((6, 4), dim=1, need_weights=False)),
        (lambda: nn.MultiheadAttention(4, 2), _draw((6, 4), dim=1, attn_mask=_CAUSAL, average_attn_weights=False)),
        (
            lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            _draw((6, 4), attn_mask=_CAUSAL, is_causal=True, need_weights=False),
        ),
        (
            lambda: nn.MultiheadAttention(4, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True),
            _draw((3, 4), (6, 4), (6, 4), key_padding_mask=_PADDING),
        ),
        (
            lambda: nn.MultiheadAttention(4, 1, bias=False, kdim=3, vdim=2, batch_first=True),
            _draw((3, 4), (6, 3), (6, 2), key_padding_mask=_PADDING, attn_mask=_CAUSAL[:3], need_weights=False),
        ),
        (lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True), _draw((2, 4), (6, 3), (6, 2), dim=1)),
    ],
)
def attention(layer: nn.MultiheadAttention, inputs: Inputs, grad_output: Any) -> PerExample:
    """Per-example contributions; ``grad_output`` belongs to the output, or to the output and the attention weights."""
    return contributions_of(_linear_maps(layer, inputs, grad_output))


@attention.fast_squares
def attention_squares(layer: nn.MultiheadAttention, inputs: Inputs, grad_output: Any, workspace: Workspace) -> Squares:
    """Sums of squared contributions, computed as for linear layers."""
    return squares_of(_linear_maps(layer, inputs, grad_output), workspace)


@attention.fast_sums
def attention_sums(layer: nn.MultiheadAttention, inputs: Inputs, grad_output: Any, workspace: Workspace) -> Sums:
    """Sums of contributions and of their squares, computed as for linear layers."""
    return sums_of(_linear_maps(layer, inputs, grad_output), workspace)


@torch.no_grad()
def _linear_maps(layer: nn.MultiheadAttention, inputs: Inputs, grad_output: Any) -> list[LinearMap]:
    """The linear maps of the layer; the appended position is one of a bias, shaped like ``bias_k``."""
    call = _Call(*inputs)
    sources = [x if layer.batch_first else x.transpose(0, 1) for x in (call.query, call.key, call.value)]  # [B, T, ·]
    attended, delta_out, deltas = _replayed(layer, call, _projected(layer, sources), grad_output)
    maps = [LinearMap("out_proj.weight", attended, delta_out), LinearMap("out_proj.bias", None, delta_out)]
    if layer.bias_k is not None:
        appended = zip(("bias_k", "bias_v"), deltas[1:], strict=True)
        maps += [LinearMap(name, None, delta[:, -1:, None, None]) for name, delta in appended]
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    names = separate if layer.in_proj_weight is None else ("in_proj_weight",) * 3
    for name, x, delta in zip(names, sources, deltas, strict=True):
        delta = delta[:, : x.shape[1]]
        maps += [LinearMap(name, x, delta), LinearMap("in_proj_bias", None, delta)]
    return maps


class _Call(NamedTuple):
    """The arguments of the layer's forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    need_weights: bool
    attn_mask: Tensor | None
    average_attn_weights: bool
    is_causal: bool


def _projected(layer: nn.MultiheadAttention, sources: list[Tensor]) -> list[Tensor]:
    """q, k and v ``[B, T, E]``, including the position that ``add_bias_kv`` appends."""
    joint = layer.in_proj_weight
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if joint is None else joint.chunk(3)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.to(sources[0].dtype).chunk(3)
    q, k, v = (F.linear(x, w.to(x.dtype), b) for x, w, b in zip(sources, weights, biases, strict=True))
    if layer.bias_k is not None and layer.bias_v is not None:
        k = torch.cat([k, layer.bias_k.to(k.dtype).expand(len(k), -1, -1)], 1)
        v = torch.cat([v, layer.bias_v.to(v.dtype).expand(len(v), -1, -1)], 1)
    return [q, k, v]


def _replayed(
    layer: nn.MultiheadAttention, call: _Call, projected: list[Tensor], grad_output: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The attention outputs a and δo, both ``[B, T, E]``, and δq, δk, δv."""
    identity = torch.eye(layer.embed_dim, dtype=call.query.dtype, device=call.query.device)
    padding, mask = call.key_padding_mask, call.attn_mask
    if layer.bias_k is not None:
        padding, mask = (None if m is None else F.pad(m, (0, 1)) for m in (padding, mask))
    query, key, value = (x.detach().transpose(0, 1).requires_grad_() for x in projected)
    with torch.enable_grad():
        attended, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            layer.embed_dim,
            layer.num_heads,
            in_proj_weight=identity.repeat(3, 1),
            in_proj_bias=None,
            bias_k=None,
            bias_v=None,
            add_zero_attn=layer.add_zero_attn,
            dropout_p=layer.dropout,
            out_proj_weight=identity,
            out_proj_bias=None,
            training=layer.training,
            key_padding_mask=padding,
            need_weights=call.need_weights,
            attn_mask=mask,
            average_attn_weights=call.average_attn_weights,
            is_causal=call.is_causal,
        )
    grad, *grad_weights = grad_output if isinstance(grad_output, tuple) else (grad_output,)
    if grad is None:
        delta_out = torch.zeros_like(attended).transpose(0, 1)
    else:
        delta_out = grad if layer.batch_first else grad.transpose(0, 1)
    outputs, grads = [attended], [(delta_out @ layer.out_proj.weight.to(attended.dtype)).transpose(0, 1)]
    if weights is not None and grad_weights and grad_weights[0] is not None:
        outputs, grads = [*outputs, weights], [*grads, *grad_weights]
    deltas = torch.autograd.grad(outputs, [query, key, value], grads)
    return attended.detach().transpose(0, 1), delta_out, [d.transpose(0, 1) for d in deltas]
