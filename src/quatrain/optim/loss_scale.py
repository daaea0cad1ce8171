"""Dynamic loss scale for fp16, held and adjusted on the device: a captured step needs no host for it.

Small gradients vanish in fp16 (below 6e-8) and large ones overflow (above 65,504). The backward therefore runs on
loss_scale times the gradient, and the clip factor divides it out again: every factor is a power of two, so no bit of a
mantissa changes. An overflow skips the update, as every non-finite gradient does, and halves the scale; after `EVERY`
updates without one it doubles (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

The engine's gradients are those of the SUM of the losses, larger than a mean's by the number of supervised tokens, so
scales here are smaller than the usual ones by about that factor.
"""

from __future__ import annotations

import torch

from quatrain.optim.state import StepState

START, LEAST, MOST = 256.0, 2.0**-14, 2.0**15
EVERY = 200


class LossScale:
    def __init__(self, state: StepState) -> None:
        self._state = state
        state.loss_scale.fill_(START)

    def unscale_squares(self, squares: torch.Tensor) -> None:
        """squares [n] of scaled gradients to those of the gradients, in place."""
        squares.div_(self._state.loss_scale).div_(self._state.loss_scale)

    def adjust(self) -> None:
        """After a step: halves the scale when it was skipped, doubles it after enough updates."""
        state, factor, grow = self._state, self._state.partial, self._state.flag
        torch.logical_not(state.skip, out=grow)
        state.good.add_(1).mul_(grow)
        torch.ge(state.good, EVERY, out=grow)
        factor.fill_(1.0).add_(grow).add_(state.skip, alpha=-0.5)
        state.loss_scale.mul_(factor).clamp_(LEAST, MOST)
        torch.logical_not(grow, out=grow)
        state.good.mul_(grow)
