"""How precisely products of float32 are computed: accelerators may round them to TF32, and users may ask for bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def rounds_products(tensor: Tensor) -> bool:
    """Whether products of tensors like this one may have a relative error of 1e-3."""
    is_full = tensor.is_cpu and torch.get_float32_matmul_precision() == "highest"
    return tensor.dtype != torch.float64 and not is_full
