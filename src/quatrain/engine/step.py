"""The training step: the loop down the blocks, the loss, the loop back up, and the update.

    embed -> block 0 -> ... -> block L-1 -> final norm -> head and loss on the supervised rows
    update <- block 0 <- ... <- block l: recompute, backward, adapter gradients <- d_hidden

Kept from the forward: the input of every block, and all intermediates of the blocks the layout keeps. The gradient goes
back and forth between two buffers; one workspace serves every block that is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from quatrain.config import InstructConfig
from quatrain.engine.device import Device, HostDevice
from quatrain.engine.device_layout import RING
from quatrain.engine.graphs import GraphCache, StepKey
from quatrain.engine.inputs import Batch, Bucket, Inputs, Loaded, bucket_for, pack_rows
from quatrain.engine.layout import Layout
from quatrain.engine.offload import Offload
from quatrain.engine.outcomes import Outcomes, Pending
from quatrain.engine.streamed_head import streamed_head
from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
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
        device: Device | None = None,
    ) -> None:
        self.params, self.adapters, self.config, self.layout = params, adapters, config, layout
        self.profiler, self.device = profiler, device or HostDevice()
        profiler.wait = self.device.synchronize
        place = adapters.master.device
        self.arena = Arena(layout.plan.slots, place)
        self.ops = profiler.timed(backend.bind(self.arena["op scratch"]))
        self.state = StepState.create(len(adapters.segments), place)
        self.optimizer = Optimizer(adapters, config, self.ops, self.state)
        self.outcomes = Outcomes(self.state, self.device)
        self._num_layers = params.spec.num_layers
        ring = [self.arena[f"ring.{i}"] for i in range(RING)] if layout.offloaded else []
        tiles = [self.arena[f"head tile.{i}"] for i in range(2)] if layout.head_tile else []
        self._head = streamed_head(params.head, tiles, self.device) if tiles else params.head
        self._offload = Offload(ring, layout.offloaded, self.device) if ring else None
        self.inputs = Inputs(
            self.arena, self.device, static=layout.static, embed=params.embed if layout.embed_on_host else None,
            embedded_slot="ring.0" if layout.offloaded else "hidden.0",
        )  # fmt: skip
        self._frequencies: tuple[torch.Tensor, float] | None = None
        rope = params.spec.rope
        if rope.kind != "dynamic" or config.max_seq_len <= rope.original_max_position:
            inv_freq, scaling = inverse_frequencies(rope, 0)
            self._frequencies = inv_freq.to(place), scaling
        self._running = backend.running
        self.graphs = self._graph_cache()
        self._tenant: object | None = None
        self.stepped = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around every use of the engine."""
        with self._running(), self.device.running():
            yield

    # Optimizer steps, replayed from a captured graph where there is one.

    def train_step(self, batches: Sequence[Batch]) -> Pending:
        """Gradients of all micro-batches, then clip and update."""
        if len(batches) <= self.layout.input_sets:
            loaded = self._load(batches, self._bucket(batches))
            self._run("train", loaded, lambda: self._step(loaded))
        else:  # one after the other through the slots of the first
            self.optimizer.begin_step()
            for batch in batches:
                self.train(batch)
            self.optimizer.end_step()
        return self.outcomes.take()

    def train_step_from(self, batch: Batch, d_final: torch.Tensor) -> Pending:
        """As `train_step` from the caller's gradient at the final norm's output, d_final [T, H]: see `train_from`."""
        (loaded,) = self._load([batch], self._bucket([batch]))
        self._take_gradient(loaded, d_final)
        self._run("from", [loaded], lambda: self._step_from(loaded))
        return self.outcomes.take()

    def prepare_steps(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Captures steps before the first: `shapes` are (tokens, targets, micro-batches), the largest micro-batch's
        tokens and targets. Nothing but captured steps remains of it: steps of inert rows alone change nothing."""
        if self.graphs is None:
            return
        empty = pack_rows([])
        buckets = {(self._bucket_for(tokens, targets), number) for tokens, targets, number in shapes}
        works: list[tuple[StepKey, Callable[[], None]]] = []
        for bucket, number in sorted(buckets, key=lambda item: item[1]):
            if number <= self.layout.input_sets:
                loaded = self._load([empty] * number, bucket)
                works.append((self._key("train", loaded), partial(self._step, loaded)))
        snapshot = self.state.snapshot()
        self.graphs.prepare(works)
        self.state.restore(snapshot)

    # Between steps, the memory of a step is free for something else.

    def lend_arena(self, slots: Sequence[Slot], tenant: object) -> Arena:
        """The arena's memory for other slots (`Arena.could_lend`), until the next step or the next tenant."""
        self._tenant = tenant
        return self.arena.lend(slots)

    def lends_to(self, tenant: object) -> bool:
        """Whether what `tenant` has written into the arena's memory is still there."""
        return self._tenant is tenant

    # The parts of a step that a caller may ask for: losses alone, a training micro-batch, a caller's own gradient.

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss of every supervised token, [R] in the accumulation dtype; valid until the next call. Nothing is
        trained."""
        loaded = self._load_alone(batch)
        self._forward(self._stream(loaded, training=False), loaded, training=False)
        return self._loss(loaded, None)[: batch.num_targets]

    def train(self, batch: Batch) -> None:
        """Forward, loss and backward of one micro-batch: gradients +=, `state.loss_sum` and `state.tokens` +=."""
        self._train(self._load_alone(batch))

    def train_from(self, batch: Batch, d_final: torch.Tensor) -> None:
        """As `train` with the caller's gradient at the final norm's output, d_final [T, H]. It is taken as it is: the
        gradients are its chain rule, not divided by a token count."""
        loaded = self._load_alone(batch)
        self._take_gradient(loaded, d_final)
        self._train_from(loaded)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The final norm's output [T, H] without dropout; valid until the next call."""
        loaded = self._load_alone(batch)
        self._forward(self._stream(loaded, training=False), loaded, training=False)
        return self.arena["final"][: batch.num_tokens]

    segment_hook: SegmentHook | None = None
    """Called with a segment's number in place of the update, right after its gradient is complete (see `collect`)."""

    def collect(self, run: Callable[[], None]) -> dict[str, torch.Tensor]:
        """Runs `run` without updating anything and returns the gradients it summed, by PEFT parameter name."""
        grads = self.adapters.named_grads()
        if not self.adapters.shared_grad:
            run()
            return self._unscaled({name: grad.clone() for name, grad in grads.items()})
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
        return self._unscaled(sums)

    def _unscaled(self, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.optimizer.loss_scale is not None:
            for grad in grads.values():
                grad.div_(self.state.loss_scale)
        return grads

    # Work as it is captured: it reads nothing on the host, and a replay repeats it on what the slots then hold.

    def _step(self, loaded: Sequence[Loaded]) -> None:
        self.optimizer.begin_step()
        for micro_batch in loaded:
            self._train(micro_batch)
        self.optimizer.end_step()

    def _step_from(self, loaded: Loaded) -> None:
        self.optimizer.begin_step()
        self._train_from(loaded)
        self.optimizer.end_step()

    def _train(self, loaded: Loaded) -> None:
        state, d_final = self.state, self.arena["d_hidden.1"][: loaded.num_tokens]
        stream = self._stream(loaded, training=True)
        self._forward(stream, loaded, training=True)
        losses = self._loss(loaded, d_final)
        torch.sum(losses, 0, dtype=torch.float64, out=state.partial)
        state.loss_sum += state.partial
        state.tokens += loaded.count
        self._backward(stream, loaded.num_tokens, self._end_segment)

    def _train_from(self, loaded: Loaded) -> None:
        stream = self._stream(loaded, training=True)
        self._forward(stream, loaded, training=True)
        self.state.tokens.fill_(1)
        self._backward(stream, loaded.num_tokens, self._end_segment)

    # The parts, in the order of a step.

    def _bucket(self, batches: Sequence[Batch]) -> Bucket | None:
        return self._bucket_for(max(b.num_tokens for b in batches), max(b.num_targets for b in batches))

    def _bucket_for(self, tokens: int, targets: int) -> Bucket | None:
        return bucket_for(tokens, targets, self.layout.tokens) if self.layout.static else None

    def _load_alone(self, batch: Batch) -> Loaded:
        return self._load([batch], self._bucket([batch]))[0]

    def _load(self, batches: Sequence[Batch], bucket: Bucket | None) -> list[Loaded]:
        if self._tenant is not None:
            self._tenant = None
            self.arena.take_back()
        self.stepped = True
        return self.inputs.load(batches, bucket)

    def _take_gradient(self, loaded: Loaded, d_final: torch.Tensor) -> None:
        slot, tokens = self.arena["d_hidden.1"][: loaded.num_tokens], d_final.shape[0]
        slot[:tokens].copy_(d_final)
        slot[tokens:].zero_()

    def _key(self, kind: str, loaded: Sequence[Loaded]) -> StepKey:
        targets = loaded[0].targets.shape[0] if kind == "train" else 0
        return StepKey(loaded[0].num_tokens, targets, len(loaded), kind)

    def _run(self, kind: str, loaded: Sequence[Loaded], work: Callable[[], None]) -> None:
        self.run(self._key(kind, loaded), work)

    def run(self, key: StepKey, work: Callable[[], None]) -> None:
        """Does `work`, of the shape `key`: captured where steps are."""
        if self.graphs is None or self.profiler.enabled:
            work()
        else:
            self.graphs.run(key, work)

    def _graph_cache(self) -> GraphCache | None:
        mode, layout = self.config.cuda_graph, self.layout
        if not layout.static or mode == "off":
            return None
        graphs = GraphCache(self.device, layout.graph_bytes, required=mode == "on")
        if self._frequencies is None:
            graphs.refuse("dynamic rope: the frequencies of long rows depend on their lengths, which the host knows")
        return graphs

    def _stream(self, loaded: Loaded, training: bool) -> Stream:
        """Prepares what all blocks share."""
        arena, spec, n = self.arena, self.params.spec, loaded.num_tokens
        cos, sin = arena["cos"][:n], arena["sin"][:n]
        if self._frequencies is not None:  # else they depend on each row's length
            self.ops.rope_tables(cos, sin, loaded.positions, *self._frequencies)
        else:
            for start, end in pairwise((*loaded.cu_seqlens, n)):
                if end > start:  # the inert tail counts as a row
                    inv_freq, scaling = inverse_frequencies(spec.rope, end - start)
                    part = slice(start, end)
                    self.ops.rope_tables(cos[part], sin[part], loaded.positions[part], inv_freq.to(cos.device), scaling)
        dropout = None
        if training and self.config.lora_dropout > 0:
            keys = arena["dropout_keys"][:n]
            self.ops.dropout_keys(keys, loaded.row_ids, loaded.positions, self.state.step, self.config.seed)
            dropout = Dropout(self.config.lora_dropout, keys)
        return Stream(self.ops, spec, loaded.rows, cos, sin, dropout)

    def _forward(self, stream: Stream, loaded: Loaded, training: bool) -> None:
        """Fills hidden.0 .. hidden.L and `final`."""
        arena, params, tokens = self.arena, self.params, loaded.num_tokens
        offload = self._offload if training else None
        with self.profiler.part("embedding"):
            first = self._hidden(0, tokens)
            if loaded.embedded is None:
                self.ops.embedding_forward(first, loaded.ids, params.embed)
            elif self.layout.input_sets > 1:  # else it is there already
                first.copy_(loaded.embedded)
            if offload is not None:
                offload.written(0, tokens)
        for layer, block in enumerate(params.blocks):
            saved = self._saved(layer, tokens, training)
            with self.profiler.part("forward", layer):
                if offload is not None:
                    offload.before_write(layer + 1)
                x, out = self._hidden(layer, tokens), self._hidden(layer + 1, tokens)
                block_forward(out, x, saved, block, stream, params.spec.windows[layer])
                if offload is not None:
                    offload.written(layer + 1, tokens)
            if not (training and self._kept(layer)):
                arena.release(saved.tensors())
        with self.profiler.part("final norm"):
            self.ops.rms_norm_forward(
                arena["final"][:tokens], arena["final_rstd"][:tokens], self._hidden(self._num_layers, tokens),
                params.final_norm, params.spec.rms_norm_eps,
            )  # fmt: skip

    def _loss(self, loaded: Loaded, d_final: torch.Tensor | None) -> torch.Tensor:
        """The losses [R] of the supervised rows; the gradient of their sum into d_final [T, H] =."""
        arena, n = self.arena, loaded.num_tokens
        losses = arena["losses"][: loaded.targets.shape[0]]
        with self.profiler.part("head and loss"):
            self.ops.head_loss(
                losses, d_final, arena["final"][:n], loaded.loss_rows, loaded.targets, self._head, arena["logits"]
            )
        return losses

    def _backward(self, stream: Stream, tokens: int, end_segment: SegmentHook) -> None:
        """From the gradient in d_hidden.1 at the final norm's output down to the first block's input."""
        arena, params, last = self.arena, self.params, self._num_layers
        d_out, d_x = arena["d_hidden.0"][:tokens], arena["d_hidden.1"][:tokens]
        if self.optimizer.loss_scale is not None:
            d_x.mul_(self.state.loss_scale)
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
            if self._offload is not None:
                self._offload.before_read(layer)
            if not self._kept(layer):
                with self.profiler.part("recompute", layer):
                    block_recompute(x, saved, block, stream, window)
            self.optimizer.begin_segment()
            with self.profiler.part("backward", layer):
                block_backward(d_x, self.adapters.norm_grads[layer], d_out, x, saved, scratch, block, stream, window)
            end_segment(layer)
            if self._offload is not None:
                self._offload.read(layer, tokens)
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
        slot = f"ring.{index % RING}" if index < self.layout.offloaded else f"hidden.{index}"
        return self.arena[slot][:tokens]
