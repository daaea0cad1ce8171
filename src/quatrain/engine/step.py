"""The training step: the loop down the blocks, the loss, the loop back up, and the update.

    embed -> block 0 -> ... -> block L-1 -> final norm -> head and loss on the supervised rows
    update <- block 0 <- ... <- block l: recompute, backward, adapter gradients <- d_hidden

Kept from the forward: the input of every block, and all intermediates of the blocks the layout keeps. The gradient goes
back and forth between two buffers; one workspace serves every block that is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quatrain.config import InstructConfig
from quatrain.engine.inputs import Batch
from quatrain.engine.layout import Layout
from quatrain.memory.arena import Arena
from quatrain.model.adapters import AdapterSet
from quatrain.model.block import Stream, block_backward, block_forward, block_recompute
from quatrain.model.params import ModelParams
from quatrain.model.rope import inverse_frequencies
from quatrain.model.workspace import BackwardScratch, Intermediates, backward_scratch, intermediates
from quatrain.ops.dropout import Dropout
from quatrain.ops.select import Backend
from quatrain.optim.optimizer import Optimizer
from quatrain.optim.state import StepState
from quatrain.profile.spans import Profiler

SegmentHook = Callable[[int], None]


class StepEngine:
    """Runs micro-batches over one model. All tensors of a step come from `arena`, laid out by `layout`."""

    def __init__(
        self,
        params: ModelParams,
        adapters: AdapterSet,
        config: InstructConfig,
        layout: Layout,
        backend: Backend,
        profiler: Profiler,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params, self.adapters, self.config, self.layout = params, adapters, config, layout
        self.profiler = profiler
        self.arena = Arena(layout.plan.slots, device)
        self.ops = profiler.timed(backend.bind(self.arena["op scratch"]))
        self.state = StepState.create(len(adapters.segments), device)
        self.optimizer = Optimizer(adapters, config, self.ops, self.state)
        self._num_layers = params.spec.num_layers
        self.running = backend.running

    # The three things a caller asks for: losses alone, a training micro-batch, a caller's own gradient.

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss of every supervised token, [R] in the accumulation dtype; valid until the next call. Nothing is
        trained."""
        stream = self._load(batch, training=False)
        self._forward(stream, batch.num_tokens, training=False)
        return self._loss(batch, None)

    def train(self, batch: Batch) -> None:
        """Forward, loss and backward of one micro-batch: gradients +=, `state.loss_sum` and `state.tokens` +=."""
        stream = self._load(batch, training=True)
        self._forward(stream, batch.num_tokens, training=True)
        losses = self._loss(batch, self.arena["d_hidden.1"][: batch.num_tokens])
        self.state.loss_sum += losses.sum(dtype=torch.float64)
        self.state.tokens += batch.num_targets
        self._backward(stream, batch.num_tokens, self._end_segment)

    def train_from(self, batch: Batch, d_final: torch.Tensor) -> None:
        """As `train` with the caller's gradient at the final norm's output, d_final [T, H]. It is taken as it is: the
        gradients are its chain rule, not divided by a token count."""
        stream = self._load(batch, training=True)
        self._forward(stream, batch.num_tokens, training=True)
        self.arena["d_hidden.1"][: batch.num_tokens].copy_(d_final)
        self.state.tokens.fill_(1)
        self._backward(stream, batch.num_tokens, self._end_segment)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The final norm's output [T, H] without dropout; valid until the next call."""
        stream = self._load(batch, training=False)
        self._forward(stream, batch.num_tokens, training=False)
        return self.arena["final"][: batch.num_tokens]

    segment_hook: SegmentHook | None = None
    """Called with a segment's number in place of the update, right after its gradient is complete (see `collect`)."""

    def collect(self, run: Callable[[], None]) -> dict[str, torch.Tensor]:
        """Runs `run` without updating anything and returns the gradients it summed, by PEFT parameter name."""
        grads = self.adapters.named_grads()
        if not self.adapters.shared_grad:
            run()
            return {name: grad.clone() for name, grad in grads.items()}
        sums = {name: torch.zeros_like(grad) for name, grad in grads.items()}

        def add(segment: int) -> None:
            for name, grad in grads.items():
                if self.adapters.segment_of(name) == segment:
                    sums[name] += grad

        self.segment_hook = add
        try:
            run()
        finally:
            self.segment_hook = None
        return sums

    # The parts, in the order of a step.

    def _load(self, batch: Batch, training: bool) -> Stream:
        """Copies the batch into its slots and prepares what all blocks share."""
        arena, spec, n, r = self.arena, self.params.spec, batch.num_tokens, batch.num_targets
        for name in ("ids", "positions", "row_ids"):
            arena[name][:n].copy_(getattr(batch, name))
        for name in ("loss_rows", "targets"):
            arena[name][:r].copy_(getattr(batch, name))
        cos, sin, positions = arena["cos"][:n], arena["sin"][:n], arena["positions"][:n]
        if spec.rope.kind == "dynamic":  # its frequencies depend on the row's own length
            bounds = list(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True))
        else:
            bounds = [(0, n)]
        for start, end in bounds:
            inv_freq, scaling = inverse_frequencies(spec.rope, end - start)
            part = slice(start, end)
            self.ops.rope_tables(cos[part], sin[part], positions[part], inv_freq, scaling)
        dropout = None
        if training and self.config.lora_dropout > 0:
            keys = arena["dropout_keys"][:n]
            self.ops.dropout_keys(keys, arena["row_ids"][:n], positions, self.state.step, self.config.seed)
            dropout = Dropout(self.config.lora_dropout, keys)
        return Stream(self.ops, spec, batch.cu_seqlens, cos, sin, dropout)

    def _forward(self, stream: Stream, tokens: int, training: bool) -> None:
        """Fills hidden.0 .. hidden.L and `final`."""
        arena, params = self.arena, self.params
        with self.profiler.part("embedding"):
            self.ops.embedding_forward(self._hidden(0, tokens), arena["ids"][:tokens], params.embed)
        for layer, block in enumerate(params.blocks):
            saved = self._saved(layer, tokens, training)
            with self.profiler.part("forward", layer):
                x, out = self._hidden(layer, tokens), self._hidden(layer + 1, tokens)
                block_forward(out, x, saved, block, stream, params.spec.windows[layer])
            if not (training and self._kept(layer)):
                arena.release(saved.tensors())
        with self.profiler.part("final norm"):
            self.ops.rms_norm_forward(
                arena["final"][:tokens], arena["final_rstd"][:tokens], self._hidden(self._num_layers, tokens),
                params.final_norm, params.spec.rms_norm_eps,
            )  # fmt: skip

    def _loss(self, batch: Batch, d_final: torch.Tensor | None) -> torch.Tensor:
        """The losses [R] of the supervised rows; the gradient of their sum into d_final [T, H] =."""
        arena, n, r = self.arena, batch.num_tokens, batch.num_targets
        losses = arena["losses"][:r]
        with self.profiler.part("head and loss"):
            self.ops.head_loss(
                losses, d_final, arena["final"][:n], arena["loss_rows"][:r], arena["targets"][:r],
                self.params.head, arena["logits"],
            )  # fmt: skip
        return losses

    def _backward(self, stream: Stream, tokens: int, end_segment: SegmentHook) -> None:
        """From the gradient in d_hidden.1 at the final norm's output down to the first block's input."""
        arena, params, last = self.arena, self.params, self._num_layers
        d_out, d_x = arena["d_hidden.0"][:tokens], arena["d_hidden.1"][:tokens]
        self.optimizer.begin_segment()
        with self.profiler.part("final norm"):
            self.ops.rms_norm_backward(
                d_out, self.adapters.norm_grads[last].get("final_norm"), d_x, self._hidden(last, tokens),
                arena["final_rstd"][:tokens], params.final_norm, None,
            )  # fmt: skip
        end_segment(last)
        scratch: BackwardScratch = backward_scratch(arena, "scratch", tokens)
        for layer in reversed(range(last)):
            block, window, x = params.blocks[layer], params.spec.windows[layer], self._hidden(layer, tokens)
            saved = self._saved(layer, tokens, training=True)
            if not self._kept(layer):
                with self.profiler.part("recompute", layer):
                    block_recompute(x, saved, block, stream, window)
            self.optimizer.begin_segment()
            with self.profiler.part("backward", layer):
                block_backward(d_x, self.adapters.norm_grads[layer], d_out, x, saved, scratch, block, stream, window)
            end_segment(layer)
            arena.release(saved.tensors())
            arena.release(scratch.tensors())
            d_out, d_x = d_x, d_out

    def _end_segment(self, index: int) -> None:
        if self.segment_hook is not None:
            self.segment_hook(index)
        elif self.optimizer.by_layer:
            with self.profiler.part("update", index):
                self.optimizer.end_segment(index)

    def _kept(self, layer: int) -> bool:
        return layer >= self.layout.first_kept

    def _saved(self, layer: int, tokens: int, training: bool) -> Intermediates:
        """The workspace of a block: its own where the layout keeps it, else the shared one."""
        prefix = f"kept.{layer}" if training and self._kept(layer) else "shared"
        saved = intermediates(self.arena, prefix, tokens, self.params.spec)
        adapted = self.params.blocks[layer].linears
        saved.u = {name: u for name, u in saved.u.items() if adapted[name].lora is not None}
        return saved

    def _hidden(self, index: int, tokens: int) -> torch.Tensor:
        return self.arena[f"hidden.{index}"][:tokens]
