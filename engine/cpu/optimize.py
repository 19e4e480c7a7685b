"""Makes a transformers model fast on a CPU without knowing which model it is: see `products.py`.

Without this a decode step of a small model mostly launches tiny operations, and a token's last bits would depend on its
batch: oneDNN sums in another order for other numbers of rows, at bounds that differ from CPU to CPU.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import nn

from tandem.engine.cpu.ops import make_kernels
from tandem.engine.cpu.packed_linear import PackedLinear
from tandem.engine.products import inexact_parts, replace_products

logger = logging.getLogger(__name__)


def optimize(model: nn.Module, *, is_int8: bool = False) -> nn.Module:
    """Replace known parts in place and return the model. Needs float32 or bfloat16 weights on a CPU.

    With `is_int8` linear layers keep their weights as int8, except the one that gives logits; nor do routers of
    experts, which choose by small differences.
    """
    with torch.inference_mode():
        replace_products(model, make_kernels(), partial(PackedLinear, is_int8=is_int8), PackedLinear)
    if parts := inexact_parts(model):
        logger.warning(
            "%s: products of %s are not known here: the last bits of a token may depend on its batch and on how its "
            "prompt was cut",
            type(model).__name__,
            ", ".join(parts),
        )
    return model
