"""Linear layers that share an input, frozen weight (NF4 or plain), optional bias, optional LoRA adapter.

Legend: T tokens, K in_features, N out_features, r rank, s the adapter's scale, m the dropout mask (1 without dropout).

    forward   u_i = (m_i * x) A_i^T                           out_i = x W_i^T + b_i + s_i u_i B_i^T (+ residual)
    backward  du_i = s_i dout_i B_i                            dx = sum_i (dout_i W_i + m_i * (du_i A_i))
              dA_i += du_i^T (m_i * x)                         dB_i += s_i dout_i^T u_i

(LoRA: Hu et al. 2021, arXiv:2106.09685. W never gets a gradient.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quatrain.ops.nf4 import Nf4Tensor


@dataclass
class Lora:
    """One adapter, as views into the layer's flat segments. A [r, K] and B [N, r] are in the compute dtype; dA and dB
    are fp32 accumulators. `scale` is alpha / r (rsLoRA: alpha / sqrt(r)) and is applied in compute, never stored in
    B. `index` numbers the adapters of a model: it keys each one's own dropout mask."""

    A: torch.Tensor
    B: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    scale: float
    index: int

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass
class Linear:
    """A frozen linear layer: `weight` [N, K] in NF4 or in the compute dtype, `bias` [N] or None, `lora` or None."""

    weight: Nf4Tensor | torch.Tensor
    bias: torch.Tensor | None = None
    lora: Lora | None = None
