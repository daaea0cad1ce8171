"""Clip and AdamW over the adapters' flat segments, in the three clip modes.

global  one norm over all gradients; everything is updated after the backward loop
layer   each segment is clipped and updated as soon as its backward is done, in one shared gradient buffer. A non-finite
        gradient skips its own segment; a non-finite loss skips all of them
none    as global, without the clip factor
"""

from __future__ import annotations

import torch

from quatrain.config import InstructConfig
from quatrain.model.adapters import AdapterSet
from quatrain.ops.select import Ops
from quatrain.optim.loss_scale import LossScale
from quatrain.optim.state import StepState


class Optimizer:
    def __init__(self, adapters: AdapterSet, config: InstructConfig, ops: Ops, state: StepState) -> None:
        self.adapters, self.config, self.ops, self.state = adapters, config, ops, state
        self.by_layer = config.clip == "layer"
        self.loss_scale = LossScale(state) if adapters.compute.dtype == torch.float16 else None
        self._max_norm = None if config.clip == "none" else config.max_grad_norm

    def begin_step(self) -> None:
        """Clears the sums of the previous step."""
        self.state.tokens.zero_()
        self.state.loss_sum.zero_()
        self.state.squares.zero_()
        if not self.by_layer:
            self.adapters.grad.zero_()

    def begin_segment(self) -> None:
        """Before a segment's backward: the shared gradient buffer starts from zero."""
        if self.by_layer:
            self.adapters.grad.zero_()

    def end_segment(self, index: int) -> None:
        """After a segment's backward, in layer mode: clip and update it."""
        parts = self.adapters.segment_grad(index)
        if not parts:
            return
        self._square(index)
        self._clip(self.state.squares[index : index + 1], scaled=True)
        for part, grad in parts:
            self._update(part, grad)

    def end_step(self) -> None:
        """Norm over all segments; the update, unless it was done layer by layer; the counters."""
        state, adapters = self.state, self.adapters
        if not self.by_layer:
            for index in range(len(adapters.segments)):
                self._square(index)
        self._clip(state.squares, scaled=not self.by_layer)
        if not self.by_layer:
            lora = adapters.compute.numel()
            for part in (slice(0, lora), slice(lora, adapters.master.numel())):
                if part.stop > part.start:
                    self._update(part, adapters.grad[part])
        if self.loss_scale is not None:
            self.loss_scale.adjust()
        state.end_step()

    def _clip(self, squares: torch.Tensor, scaled: bool) -> None:
        """`scale`, `norm` and `skip` from squares of gradients; `scaled`: they still carry the loss scale."""
        state = self.state
        if self.loss_scale is not None and scaled:
            self.loss_scale.unscale_squares(squares)
        self.ops.clip_scale(state.scale, state.norm, state.skip, squares, state.loss_sum, state.tokens, self._max_norm)
        if self.loss_scale is not None:
            state.scale.div_(state.loss_scale)

    def _square(self, index: int) -> None:
        slot, partial = self.state.squares[index], self.state.partial
        for _, grad in self.adapters.segment_grad(index):
            self.ops.sum_squares(partial, grad)
            slot += partial

    def _update(self, part: slice, grad: torch.Tensor) -> None:
        config, state, adapters = self.config, self.state, self.adapters
        decay = config.weight_decay if part.start < adapters.compute.numel() else 0.0
        self.ops.adamw_step(
            adapters.master[part], adapters.exp_avg[part], adapters.exp_avg_sq[part], grad,
            state.scale, state.skip, state.lr, state.step, config.betas, config.adam_eps, decay,
        )  # fmt: skip
        adapters.refresh(part)
