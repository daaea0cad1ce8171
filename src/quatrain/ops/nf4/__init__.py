"""NF4: 4-bit NormalFloat weights, bit for bit the layout of bitsandbytes (`quant_type="nf4"`, block 64).

Source: QLoRA, Dettmers et al. 2023 (arXiv:2305.14314), section 3. A tensor is flattened and cut into blocks of 64; each
block is scaled by its absolute maximum and every value becomes the index of the nearest of 16 codes. With nested
statistics ("double quantisation") the absmax values lose their mean (`offset`) and are quantised again, to 8 bits, in
blocks of 256.

    w[i]      = CODE[codes[i]] * absmax[i // 64]                  (fp32 product, one rounding)
    absmax[b] = CODE2[absmax_codes[b]] * absmax2[b // 256] + offset              (nested)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 64
NESTED_BLOCK = 256


@dataclass(frozen=True)
class Nf4Tensor:
    """A frozen weight of `shape` (out_features, in_features) in NF4.

    codes         uint8 [ceil(n / 2)]   two codes a byte, the even element in the high nibble
    absmax        fp32 [ceil(n / 64)]   plain statistics, or None when nested
    absmax_codes  uint8 [ceil(n / 64)]  nested: 8-bit code of (absmax - offset)
    absmax2       fp32 [ceil(blocks / 256)]
    offset        fp32 []               mean of absmax
    code2         fp32 [256]            the 8-bit code book of the nested level, shared by all tensors
    """

    shape: tuple[int, int]
    codes: torch.Tensor
    absmax: torch.Tensor | None = None
    absmax_codes: torch.Tensor | None = None
    absmax2: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    code2: torch.Tensor | None = None

    @property
    def nested(self) -> bool:
        return self.absmax_codes is not None

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def nbytes(self) -> int:
        """Bytes of this tensor's own storage (the shared code book not counted)."""
        own = (self.codes, self.absmax, self.absmax_codes, self.absmax2, self.offset)
        return sum(t.numel() * t.element_size() for t in own if t is not None)
