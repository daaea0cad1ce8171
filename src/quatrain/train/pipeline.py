"""The public face of the engine: one model, its adapters, and the steps that train, evaluate and use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from quatrain.config import GenerateConfig, InstructConfig
from quatrain.data.disk import configured_folder
from quatrain.data.pack import pack
from quatrain.data.row import Row
from quatrain.data.rows import Rows
from quatrain.data.stream import StopTexts
from quatrain.data.tokenizer import Tokenizer
from quatrain.engine.inputs import Batch, pack_rows, split_rows
from quatrain.engine.layout import Layout
from quatrain.engine.setup import choose_layout, engine_device, reserve
from quatrain.engine.step import StepEngine
from quatrain.errors import CheckpointError, ConfigError, DataError
from quatrain.memory.plan import Held, MemoryPlan
from quatrain.model.adapters import AdapterSet
from quatrain.model.params import params_on
from quatrain.profile.spans import Profiler
from quatrain.train.results import BatchResult, PendingStep, StepResult, perplexity
from quatrain.train.watch import peak_bytes

if TYPE_CHECKING:
    from quatrain.checkpoint.open import ModelSource
    from quatrain.engine.decoding import DeviceDecoder
    from quatrain.model.decoder import Decoder

Sample: TypeAlias = "Row | tuple[Sequence[int], Sequence[int]]"
"""A tokenised row, or (prompt ids, response ids): the response is supervised."""


class InstructPipeline:
    """A frozen model with trainable adapters. Build it with `from_pretrained`."""

    def __init__(self, source: ModelSource, config: InstructConfig, layout: Layout) -> None:
        from quatrain.checkpoint.cache import BaseCache
        from quatrain.checkpoint.load import load_params

        self.source, self.config, self.spec = source, config, source.spec
        self.tokenizer: Tokenizer | None = source.tokenizer()
        self.profiler = Profiler()
        self._layout = layout
        folder = configured_folder(config)
        cache = BaseCache(folder) if folder else None
        params = load_params(
            source, quantize=config.quantize, double_quant=config.double_quant, compute_dtype=layout.compute_dtype,
            quantizer=layout.backend.quantize, error_of=layout.backend.quantize_error, cache=cache,
        )  # fmt: skip
        self.notices: list[str] = cache.notices if cache else []
        device = engine_device(layout.device)
        reserve(layout, self, source.name)
        if layout.device != "cpu":
            params = params_on(layout.device, params, embed_stays=layout.embed_on_host, head_stays=layout.head_tile > 0)
        self.adapters = AdapterSet(self.spec, config, layout.compute_dtype, layout.device)
        self.adapters.attach(params)
        self.adapters.initialise(config.seed)
        self.engine = StepEngine(params, self.adapters, config, layout, layout.backend, self.profiler, device)
        self.set_learning_rate(config.learning_rate)

    @classmethod
    def from_pretrained(cls, path: str | Path, config: InstructConfig | None = None) -> InstructPipeline:
        """Opens a Hugging Face folder or hub id, a GGUF file or a known alias. Plans the memory, then reads the
        weights.

        Raises ModelError for what cannot be used, PlanError when it does not fit, ConfigError for options that do not
        apply."""
        from quatrain.checkpoint.open import open_source

        return cls.from_source(open_source(str(path)), config)

    @classmethod
    def from_source(cls, source: ModelSource, config: InstructConfig | None = None) -> InstructPipeline:
        """As `from_pretrained`, for a source that is already open."""
        config = config or InstructConfig()
        source.tokenizer()  # first, so that its memory is part of what the plan finds in the process
        return cls(source, config, choose_layout(source.spec, config, source.stored_nf4_nested))

    # Training.

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next step. It lives on the device; nothing is rebuilt."""
        self.engine.state.lr.fill_(lr)

    def train_step(self, samples: Sequence[Sample]) -> StepResult:
        """One optimizer step over `samples`, in as many micro-batches as their tokens need.

        Raises DataError for a row that is too long, has ids outside the vocabulary, or has nothing to learn from."""
        return self.train_micro_batches(split_rows(self._rows(samples), self._layout.tokens))

    def train_micro_batches(self, micro_batches: Sequence[Sequence[Sample]]) -> StepResult:
        """One optimizer step over given micro-batches; its gradient is the mean over all their supervised tokens."""
        return self.start_step(micro_batches).result()

    def start_step(self, micro_batches: Sequence[Sequence[Sample]]) -> PendingStep:
        """As `train_micro_batches`, without waiting for the result: on a GPU the step has only been enqueued."""
        batches = self._batches([self._rows(rows) for rows in micro_batches])
        self._require_targets(batches)
        if len(batches) > 1 and self.config.clip == "layer":
            raise ConfigError(
                f"clip 'layer' updates inside the backward loop: want one micro-batch a step, got {len(batches)}",
                hint="use --clip global, or raise micro_batch_tokens so that a step is one micro-batch",
            )
        with self.engine.running():
            return PendingStep(self.engine.train_step(batches), batches)

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be started before the first one's result is asked for without losing time."""
        return 0 if self._layout.device == "cpu" else 1

    def prepare_steps(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Captures the shapes of coming steps, where steps are captured: (most tokens, most supervised tokens, number)
        of their micro-batches."""
        if self.engine.graphs is None:
            return
        with self.engine.running():
            self.engine.prepare_steps(shapes)

    def watch_graphs(self, on_refused: Callable[[str], None]) -> None:
        """Calls `on_refused` once, with the reason, when steps are no longer captured."""
        if self.engine.graphs is None:
            return
        told = on_refused
        self.engine.graphs.on_refused = lambda reason: told(f"steps run without a captured graph: {reason}")
        if self.engine.graphs.reason is not None:
            self.engine.graphs.on_refused(self.engine.graphs.reason)

    def graph_report(self) -> dict[str, Any]:
        """What was captured, how often it was replayed, and why not more."""
        if self.engine.graphs is not None:
            return self.engine.graphs.report()
        off = "cuda_graph is off" if self._layout.device != "cpu" else "the CPU captures no graphs"
        return {"captured": [], "replays": 0, "reason": off}

    def backward_step(self, samples: Sequence[Sample], d_hidden: torch.Tensor) -> StepResult:
        """One optimizer step from the caller's gradient d_hidden [T, H] at the final norm's output, T the tokens of
        `samples` in order. The gradient is taken as it is; clip and update are the usual ones. `loss` is NaN: it is
        the caller's."""
        batches = self._batches([self._rows(samples)])
        self._check_d_hidden(batches, d_hidden)
        with self.engine.running():
            return PendingStep(self.engine.train_step_from(batches[0], d_hidden), batches, loss=math.nan).result()

    # Gradients without an update.

    def loss_and_gradients(self, samples: Sequence[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
        """The mean loss over the supervised tokens and its gradient by PEFT parameter name, fp32. Nothing is
        updated."""
        batches = self._batches(split_rows(self._rows(samples), self._layout.tokens))
        self._require_targets(batches)
        count = sum(batch.num_targets for batch in batches)

        def accumulate() -> None:
            for batch in batches:
                self.engine.train(batch)

        with self.engine.running():
            self.engine.optimizer.begin_step()
            sums = self.engine.collect(accumulate)
        return self.engine.state.loss_sum.item() / count, {name: grad / count for name, grad in sums.items()}

    def hidden_gradients(self, samples: Sequence[Sample], d_hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """The adapters' gradients from the caller's d_hidden [T, H] at the final norm's output. Nothing is updated.

        All samples together must fit one micro-batch (ConfigError)."""
        batches = self._batches([self._rows(samples)])
        self._check_d_hidden(batches, d_hidden)
        with self.engine.running():
            self.engine.optimizer.begin_step()
            return self.engine.collect(lambda: self.engine.train_from(batches[0], d_hidden))

    def hidden_states(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The final norm's output [T, H] over the samples in order, for a caller's own loss. No dropout."""
        batches = self._batches([self._rows(samples)])
        with self.engine.running():
            return self.engine.hidden(batches[0]).clone()

    # Evaluation.

    def evaluate(self, samples: Sequence[Sample]) -> BatchResult:
        """The token-weighted mean loss. A pure function of weights and rows: no dropout, nothing trained."""
        losses = self.token_losses(samples)
        count = losses.numel()
        if count == 0:
            raise DataError("nothing to evaluate: no supervised token in any row")
        mean = losses.sum().item() / count
        return BatchResult(mean, count, perplexity(mean))

    def token_losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The loss of every supervised token in order, fp64. Of `Rows`, one micro-batch is in memory at a time."""
        rows = samples if isinstance(samples, Rows) else self._rows(samples)
        lengths = rows.lengths if isinstance(rows, Rows) else np.fromiter(map(len, rows), np.int64)
        groups = (rows[begin:end] for begin, end in pairwise(pack(lengths, self._layout.tokens).tolist()))
        losses = []
        with self.engine.running():
            for group in groups:
                (batch,) = self._batches([self._rows(group)])
                losses.append(self.engine.evaluate(batch).to(torch.float64))
            if not losses:
                raise DataError("no rows were given")
            return torch.cat(losses)

    # A look inside.

    def layer_norms(self) -> tuple[list[float], list[float]]:
        """Of each layer the norm of what its adapters add to the weights, and of its part of the last optimizer step's
        mean gradient, before clipping (NaN before the first one). Changes nothing."""
        state, layers = self.engine.state, self.spec.num_layers
        with self.engine.running():
            parts = (state.squares / state.squares.sum()).sqrt() * state.norm
            return self.adapters.change_norms().tolist(), parts[:layers].tolist()

    def peak_bytes(self) -> int:
        """The most memory taken so far: of the GPU where the run is on one, else by this process."""
        return peak_bytes(self._layout.device)

    # Text.

    def generate(self, prompt: str | Sequence[int], config: GenerateConfig | None = None) -> str:
        """The continuation of a raw text (encoded with the model's own BOS rule) or of token ids, decoded. It ends
        before a stop text."""
        tokenizer, config = self._need_tokenizer(), config or GenerateConfig()
        ids = tokenizer.encode(prompt, bos=True) if isinstance(prompt, str) else list(prompt)
        decoder, stops, text = tokenizer.stream_decoder(), StopTexts(config.stop), ""
        for token in self.stream(ids, config):
            text += stops.push(decoder.push(token))
            if stops.stopped:
                return text
        return text + stops.push(decoder.finish()) + stops.finish()

    def generate_chat(self, system: str | None, user: str, config: GenerateConfig | None = None) -> str:
        """The answer to one user message, through the model's own chat template."""
        return self.generate(self.chat_ids(system, user), config)

    def chat_ids(self, system: str | None, user: str) -> list[int]:
        """The token ids of the prompt that `generate_chat` sends: a prefix of the training ids of the same
        conversation."""
        from quatrain.data.render import render_chat

        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        return list(render_chat(messages, self._need_tokenizer(), add_generation_prompt=True).ids)

    def generate_ids(self, prompts: Sequence[Sequence[int]], config: GenerateConfig | None = None) -> list[list[int]]:
        """The new token ids for each prompt, decoded together; the end token is left out. Where a stop text ends a row,
        its own tokens are still there."""
        from quatrain.model.generate import generate

        config, stop_when = config or GenerateConfig(), None
        if config.stop:
            stop_when = _contains_any(self._need_tokenizer(), config.stop)
        rows = generate(self._decoder(), prompts, config, end_ids=self.end_ids, stop_when=stop_when)
        return [row.ids for row in rows]

    def stream(self, ids: Sequence[int], config: GenerateConfig | None = None) -> Iterator[int]:
        """New token ids one by one, until an end token or the limit. Stop texts are for the caller, who sees the text
        (`data.stream.StopTexts`)."""
        from quatrain.model.generate import stream

        return stream(self._decoder(), ids, config or GenerateConfig(), end_ids=self.end_ids)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the model's, and what the chat template in use writes behind one."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return self.source.eos_token_ids
        from quatrain.data.render import end_token_ids

        return tuple(dict.fromkeys((*self.source.eos_token_ids, *end_token_ids(self.tokenizer))))

    def _decoder(self) -> Decoder | DeviceDecoder:
        if self._layout.static:
            from quatrain.engine.decoding import DeviceDecoder

            return DeviceDecoder(self.engine)
        from quatrain.model.decoder import Decoder

        return Decoder(self.engine.params, self._layout.backend, self._layout.generation_room(self.engine.stepped))

    # Files.

    def save_adapter(self, folder: str | Path) -> None:
        """Writes PEFT's `adapter_config.json` and `adapter_model.safetensors` and the tokenizer's files, reads them
        back and compares. Raises CheckpointError when any of that fails, or when `folder` holds something else; an
        earlier adapter in it is replaced only at the end."""
        from quatrain.checkpoint.peft import save_adapter
        from quatrain.checkpoint.trained_rows import TrainedRows

        if isinstance(self.source, TrainedRows):
            raise CheckpointError("this adapter brings its own embedding or head, which would not be saved")
        save_adapter(
            folder, _on_host(self.adapters.named()), self.config, num_layers=self.spec.num_layers,
            base_name=self.source.name, base_fingerprint=self.source.fingerprint(),
            files=self.tokenizer.files_to_save() if self.tokenizer else None,
        )  # fmt: skip

    def load_adapter(self, folder: str | Path, *, any_base: bool = False) -> list[str]:
        """Puts a saved adapter in place, all of it or nothing; returns notices to show. Raises CheckpointError."""
        from quatrain.checkpoint.peft import load_adapter
        from quatrain.checkpoint.trained_rows import TrainedRows

        notices = load_adapter(
            folder, self.adapters.named(), self.config, base_fingerprint=self.source.fingerprint(), any_base=any_base,
            rows_in_place=isinstance(self.source, TrainedRows),
        )  # fmt: skip
        self.adapters.refresh()
        return notices

    def state(self) -> dict[str, torch.Tensor]:
        """All that a resumed run needs to go on bit for bit: masters, moments, counters. On the CPU views, not
        copies."""
        return _on_host(self._state())

    def _state(self) -> dict[str, torch.Tensor]:
        exp_avg, exp_avg_sq = self.adapters.named_moments()
        state = {f"master.{name}": tensor for name, tensor in self.adapters.named().items()}
        state |= {f"exp_avg.{name}": tensor for name, tensor in exp_avg.items()}
        state |= {f"exp_avg_sq.{name}": tensor for name, tensor in exp_avg_sq.items()}
        scalars = ["step", "skipped"]
        if self.engine.optimizer.loss_scale is not None:
            scalars += ["loss_scale", "good"]
        return state | {name: getattr(self.engine.state, name) for name in scalars}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned, all of it or nothing. Raises CheckpointError naming what differs."""
        own = self._state()
        problems = [f"missing {name}" for name in own if name not in state]
        problems += [f"unexpected {name}" for name in state if name not in own]
        problems += [
            f"{name} is {tuple(state[name].shape)}, want {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in state and state[name].shape != tensor.shape
        ]
        if problems:
            raise CheckpointError("the saved state does not fit this run: " + "; ".join(problems[:8]))
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.adapters.refresh()

    def plan(self, generate: GenerateConfig | None = None) -> MemoryPlan:
        """Every byte of the run by name. With `generate` also what generating takes for a prompt of `max_seq_len`
        tokens; on a GPU that is memory of the step."""
        plan = self._layout.plan
        if generate is None or self._layout.static:
            return plan
        from quatrain.model.decoder import Decoder, position_limit

        prompt = min(self.config.max_seq_len, position_limit(self.spec) - 1)
        slots = min(prompt + generate.max_new_tokens, position_limit(self.spec))
        needed = Decoder(self.engine.params, self._layout.backend).bytes_for([prompt], slots)
        return replace(plan, held=(*plan.held, Held("generation", f"one row of {slots} tokens", needed)))

    @property
    def layout(self) -> Layout:
        return self._layout

    # Checks at the door.

    def _rows(self, samples: Sequence[Sample]) -> list[Row]:
        rows = [s if isinstance(s, Row) else Row.from_pair(s[0], s[1], f"sample {i}") for i, s in enumerate(samples)]
        for i, row in enumerate(rows):
            where = row.source or f"sample {i}"
            if not row.input_ids:
                raise DataError(f"{where}: the row has no tokens")
            if len(row) > self.config.max_seq_len:
                raise DataError(
                    f"{where}: {len(row)} tokens, max_seq_len is {self.config.max_seq_len}",
                    hint="raise max_seq_len, or truncate the row yourself: the engine never does",
                )
            if not all(0 <= i < self.spec.vocab_size for i in row.input_ids):
                bad = next(i for i in row.input_ids if not 0 <= i < self.spec.vocab_size)
                raise DataError(f"{where}: token id {bad} is outside the embedding's {self.spec.vocab_size} rows")
        return rows

    def _batches(self, groups: Sequence[Sequence[Row]]) -> list[Batch]:
        """One batch for each non-empty group; rows are numbered through the whole optimizer step."""
        batches, first = [], 0
        for rows in groups:
            if not rows:
                continue
            tokens = sum(map(len, rows))
            if tokens > self._layout.tokens:
                raise ConfigError(
                    f"a micro-batch of {tokens} tokens, the plan holds {self._layout.tokens}",
                    hint="give the rows to train_step, which splits them, or raise micro_batch_tokens",
                )
            batches.append(pack_rows(rows, first))
            first += len(rows)
        if not batches:
            raise DataError("no rows were given")
        return batches

    def _require_targets(self, batches: list[Batch]) -> None:
        if sum(batch.num_targets for batch in batches) == 0:
            raise DataError("no supervised token in any row: there is nothing to learn from")

    def _check_d_hidden(self, batches: list[Batch], d_hidden: torch.Tensor) -> None:
        want = (batches[0].num_tokens, self.spec.hidden_size)
        if tuple(d_hidden.shape) != want:
            raise DataError(
                f"d_hidden: want shape {want} (tokens of all samples, hidden size), got {tuple(d_hidden.shape)}"
            )

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.source.name} has no tokenizer: text needs one", hint="use token ids (generate_ids, train_step)"
            )
        return self.tokenizer


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _contains_any(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    def stopped(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids)
        return any(stop in text for stop in stops)

    return stopped
