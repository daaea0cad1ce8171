"""NF4 by the native library: the codes and block scales of a whole tensor in one call, bit for bit the reference's.

The nested statistics are a 64th of the values and stay with torch.
"""

from __future__ import annotations

import torch

from quatrain.ops import native
from quatrain.ops.library import Context
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4.reference import check_weight, not_finite, with_statistics


def quantize(context: Context, weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
    """`weight` [N, K] (fp32, bf16 or fp16, any strides) in NF4, with nested statistics if `double_quant`. There is no
    kernel for fp16, so it is widened first, which is exact.

    Raises KernelError as the reference does.
    """
    check_weight(weight)
    values = weight.detach()
    values = (values.float() if values.dtype == torch.float16 else values).contiguous()
    codes, absmax, finite = native.quantize(context, values)
    if not finite:
        raise not_finite()
    absmax.abs_()  # a block of zeros may come as -0
    return with_statistics(weight, codes, absmax, double_quant)
