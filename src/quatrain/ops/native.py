"""The native backend: every op as a call into the kernel library, over tensors that already have memory.

The adapters here check each tensor once at the door (dtype, contiguous, CPU) and pass raw pointers. Scratch is one slot
that the engine provides; a kernel never allocates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quatrain.errors import KernelError
from quatrain.ops import library
from quatrain.ops.dropout import Dropout
from quatrain.ops.library import Context
from quatrain.ops.linear_lora import Linear
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.select import Ops, Sizes

_CODES = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = tuple(_CODES)
"""The activation dtypes that kernels exist for."""


HEAD_PARTS = 8
"""Gradient accumulators of the head's kernel, fp32 [chunk, hidden] each (kParts in native/src/head.h)."""


def head_chunk(hidden: int, vocab: int) -> int:
    """Rows of the head at a time: more read the head less often, fewer keep the accumulators in the cache. About 10 MB
    for all of them was best at hidden size 576 (see docs/LOG.md)."""
    return max(128, (10 << 20) // (HEAD_PARTS * hidden * 4) // 32 * 32)


def scratch_bytes(context: Context, sizes: Sizes) -> int:
    """The most that any op needs at these sizes."""
    code = _CODES[sizes.dtype]
    needs = [0]
    for k, outs in sizes.groups:
        group = _shapes(k, outs, sizes.rank)
        dropout = library.QtDropout(1 if sizes.dropout else None, 0.0)
        args = (code, group, len(outs), sizes.tokens)
        needs.append(context.size("qt_linear_forward_scratch_bytes", *args, ctypes.byref(dropout)))
        needs.append(context.size("qt_linear_backward_scratch_bytes", *args))
    shape = ctypes.byref(library.QtAttention(sizes.heads, sizes.kv_heads, sizes.head_dim, 0, 1.0))
    needs.append(context.size("qt_attention_forward_scratch_bytes", code, shape, sizes.longest_row))
    needs.append(context.size("qt_attention_backward_scratch_bytes", code, shape, sizes.longest_row))
    needs.append(context.size("qt_head_loss_scratch_bytes", code, sizes.head_chunk, sizes.hidden, sizes.vocab))
    largest_segment = sum(sizes.rank * (k + n) for k, outs in sizes.groups for n in outs)
    needs.append(8 * context.size("qt_sum_squares_partials", largest_segment))
    return int(max(needs))


def decode_scratch_bytes(context: Context, sizes: Sizes) -> int:
    """The most that any op of a decoding step needs, for `sizes.tokens` rows of at most `sizes.longest_row` slots."""
    code = _CODES[sizes.dtype]
    shape = ctypes.byref(library.QtAttention(sizes.heads, sizes.kv_heads, sizes.head_dim, 0, 1.0))
    needs = [context.size("qt_attention_cached_scratch_bytes", code, shape, sizes.longest_row)]
    for k, outs in (*sizes.groups, (sizes.hidden, (sizes.vocab,))):
        group = _shapes(k, outs, sizes.rank)
        needs.append(context.size("qt_linear_decode_scratch_bytes", code, group, len(outs), sizes.tokens))
    return int(max(needs))


def _shapes(k: int, outs: Sequence[int], rank: int) -> ctypes.Array[library.QtLinear]:
    """A group of NF4 linears without memory, for the functions that only ask for sizes."""
    group = (library.QtLinear * len(outs))()
    for entry, n in zip(group, outs, strict=True):
        entry.weight.n, entry.weight.k, entry.weight.codes, entry.rank = n, k, 1, rank
    return group


def capture(context: Context, scratch: torch.Tensor, run: Callable[[Ops], None]) -> Callable[[], None]:
    """Runs `run` with ops over `scratch`; the result makes the same kernel calls again, without the Python around them.
    Whatever torch does in `run` is not repeated, and all tensors must stay where they are."""
    recorder = library.Recorder(context)
    run(native_ops(recorder, scratch))
    return recorder.replay


def native_ops(context: Context | library.Recorder, scratch: torch.Tensor) -> Ops:
    """The ops over `scratch`, uint8. What is not worth a kernel (RoPE tables, dropout keys, the clip factor: a few
    numbers each) stays with torch."""
    from quatrain.ops.dropout.reference import dropout_keys
    from quatrain.ops.grad_norm.reference import clip_scale
    from quatrain.ops.rope.reference import rope_tables
    from quatrain.ops.sampling.reference import sample_tokens

    native = _Native(context, scratch)
    return Ops(
        embedding_forward=native.embedding_forward,
        rope_tables=rope_tables,
        rope_forward=native.rope_forward,
        rope_backward=native.rope_backward,
        dropout_keys=dropout_keys,
        rms_norm_forward=native.rms_norm_forward,
        rms_norm_backward=native.rms_norm_backward,
        linear_lora_forward=native.linear_lora_forward,
        linear_lora_backward=native.linear_lora_backward,
        linear_lora_decode=native.linear_lora_decode,
        lora_down_forward=native.lora_down_forward,
        attention_forward=native.attention_forward,
        attention_backward=native.attention_backward,
        cached_attention_forward=native.cached_attention_forward,
        sample_tokens=sample_tokens,
        swiglu_forward=native.swiglu_forward,
        swiglu_backward=native.swiglu_backward,
        head_loss=native.head_loss,
        sum_squares=native.sum_squares,
        clip_scale=clip_scale,
        adamw_step=native.adamw_step,
    )


@dataclass(frozen=True)
class _Native:
    """Adapters from the ops' signatures to the library's. Docstrings and formulas are in the ops' packages."""

    context: Context | library.Recorder
    scratch: torch.Tensor

    def embedding_forward(self, out: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
        rows, dim = out.shape
        self.context.call(
            "qt_embedding",
            _CODES[out.dtype],
            pointer(out),
            pointer(ids, torch.int64),
            pointer(table, out.dtype),
            rows,
            dim,
        )

    def rope_forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._rope(x, cos, sin, 1.0)

    def rope_backward(self, dx: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._rope(dx, cos, sin, -1.0)

    def _rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> None:
        tokens, heads, dim = x.shape
        self.context.call(
            "qt_rope", _CODES[x.dtype], pointer(x), pointer(cos, torch.float32), pointer(sin, torch.float32), sign,
            tokens, heads, dim, cos.shape[1],
        )  # fmt: skip

    def rms_norm_forward(
        self, out: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        rows, dim = x.shape
        self.context.call(
            "qt_rms_norm_forward", _CODES[x.dtype], pointer(out, x.dtype), pointer(rstd, torch.float32), pointer(x),
            pointer(weight, torch.float32), eps, rows, dim,
        )  # fmt: skip

    def rms_norm_backward(
        self,
        dx: torch.Tensor,
        dweight: torch.Tensor | None,
        dout: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        rows, dim = x.shape
        self.context.call(
            "qt_rms_norm_backward", _CODES[x.dtype], pointer(dx, x.dtype), pointer(dweight, torch.float32),
            pointer(dout, x.dtype), pointer(x), pointer(rstd, torch.float32), pointer(weight, torch.float32),
            pointer(residual, x.dtype), rows, dim,
        )  # fmt: skip

    def linear_lora_forward(
        self,
        outs: Sequence[torch.Tensor],
        us: Sequence[torch.Tensor | None],
        x: torch.Tensor,
        linears: Sequence[Linear],
        dropout: Dropout | None,
        residual: torch.Tensor | None = None,
    ) -> None:
        self.context.call(
            "qt_linear_forward", _CODES[x.dtype], pointer(x), _group(linears, outs, us, x.dtype), len(linears),
            pointer(residual, x.dtype), x.shape[0], _dropout(dropout), *self._scratch(),
        )  # fmt: skip

    def linear_lora_decode(
        self,
        outs: Sequence[torch.Tensor],
        us: Sequence[torch.Tensor | None],
        x: torch.Tensor,
        linears: Sequence[Linear],
        dropout: None,
        residual: torch.Tensor | None = None,
    ) -> None:
        self.context.call(
            "qt_linear_decode", _CODES[x.dtype], pointer(x), _group(linears, outs, us, x.dtype), len(linears),
            pointer(residual, x.dtype), x.shape[0], *self._scratch(),
        )  # fmt: skip

    def lora_down_forward(
        self, us: Sequence[torch.Tensor | None], x: torch.Tensor, linears: Sequence[Linear], dropout: Dropout | None
    ) -> None:
        self.context.call(
            "qt_lora_down", _CODES[x.dtype], pointer(x), _group(linears, [None] * len(linears), us, x.dtype),
            len(linears), x.shape[0], _dropout(dropout), *self._scratch(),
        )  # fmt: skip

    def linear_lora_backward(
        self,
        dx: torch.Tensor,
        douts: Sequence[torch.Tensor],
        x: torch.Tensor,
        us: Sequence[torch.Tensor | None],
        linears: Sequence[Linear],
        dropout: Dropout | None,
    ) -> None:
        self.context.call(
            "qt_linear_backward", _CODES[x.dtype], pointer(dx, x.dtype), pointer(x),
            _group(linears, douts, us, x.dtype), len(linears), x.shape[0], _dropout(dropout), *self._scratch(),
        )  # fmt: skip

    def attention_forward(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: Sequence[int],
        scale: float,
        window: int | None,
    ) -> None:
        self.context.call(
            "qt_attention_forward", _CODES[q.dtype], pointer(out, q.dtype), pointer(lse, torch.float32), pointer(q),
            pointer(k, q.dtype), pointer(v, q.dtype), *_rows(cu_seqlens), _attention(q, k, scale, window),
            *self._scratch(),
        )  # fmt: skip

    def attention_backward(
        self,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: Sequence[int],
        scale: float,
        window: int | None,
    ) -> None:
        self.context.call(
            "qt_attention_backward", _CODES[q.dtype], *(pointer(t, q.dtype) for t in (dq, dk, dv, dout, out)),
            pointer(lse, torch.float32), *(pointer(t, q.dtype) for t in (q, k, v)), *_rows(cu_seqlens),
            _attention(q, k, scale, window), *self._scratch(),
        )  # fmt: skip

    def cached_attention_forward(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> None:
        self.context.call(
            "qt_attention_cached", _CODES[q.dtype], *(pointer(t, q.dtype) for t in (out, q, k, v, keys, values)),
            pointer(lengths, torch.int64), *keys.shape[:2], _attention(q, k, scale, window), *self._scratch(),
        )  # fmt: skip

    def swiglu_forward(self, out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
        args = (pointer(t, gate.dtype) for t in (out, gate, up))
        self.context.call("qt_swiglu_forward", _CODES[gate.dtype], *args, gate.numel())

    def swiglu_backward(
        self, dgate: torch.Tensor, dup: torch.Tensor, dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> None:
        args = (pointer(t, gate.dtype) for t in (dgate, dup, dout, gate, up))
        self.context.call("qt_swiglu_backward", _CODES[gate.dtype], *args, gate.numel())

    def head_loss(
        self,
        losses: torch.Tensor,
        dhidden: torch.Tensor | None,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        head: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        tokens, width = hidden.shape
        self.context.call(
            "qt_head_loss", _CODES[hidden.dtype], pointer(losses, torch.float32), pointer(dhidden, hidden.dtype),
            pointer(hidden), pointer(rows, torch.int64), pointer(targets, torch.int64), rows.shape[0],
            pointer(head, hidden.dtype), tokens, width, head.shape[0], logits.shape[0], *self._scratch(),
        )  # fmt: skip

    def sum_squares(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        n = grad.numel()
        partials = self.context.size("qt_sum_squares_partials", n)
        if self.scratch.numel() < 8 * partials:
            raise KernelError(f"sum_squares: scratch has {self.scratch.numel()} bytes, want {8 * partials}")
        self.context.call(
            "qt_sum_squares", pointer(out, torch.float64), pointer(grad, torch.float32), n, pointer(self.scratch)
        )

    def adamw_step(
        self,
        param: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        scale: torch.Tensor,
        skip: torch.Tensor,
        lr: torch.Tensor,
        step: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.context.call(
            "qt_adamw", *(pointer(t, torch.float32) for t in (param, exp_avg, exp_avg_sq)), None,
            pointer(grad, torch.float32), pointer(scale, torch.float64), pointer(skip, torch.bool),
            pointer(lr, torch.float64), pointer(step, torch.int64), *betas, eps, weight_decay, param.numel(),
        )  # fmt: skip

    def _scratch(self) -> tuple[int | None, int]:
        return pointer(self.scratch), self.scratch.numel()


def quantize(context: Context, codes: torch.Tensor, absmax: torch.Tensor, values: torch.Tensor) -> bool:
    """codes, absmax = NF4 of a contiguous tensor, as `ops/nf4` lays them out. Returns whether all values are finite."""
    finite = ctypes.c_int32()
    context.call(
        "qt_nf4_quantize", _CODES[values.dtype], pointer(codes, torch.uint8), pointer(absmax, torch.float32),
        ctypes.byref(finite), pointer(values), values.numel(),
    )  # fmt: skip
    return bool(finite.value)


def squared_error(context: Context, sums: ctypes.Array[ctypes.c_double], w: Nf4Tensor, values: torch.Tensor) -> None:
    """sums = the sums of (w - values)^2 and of values^2; `values` is contiguous, of `w`'s shape."""
    entry = library.QtWeight()
    _fill_weight(entry, w, values.dtype)
    error, norm = ctypes.addressof(sums), ctypes.addressof(sums) + 8
    context.call("qt_nf4_error", _CODES[values.dtype], error, norm, ctypes.byref(entry), pointer(values))


def dequantize(context: Context, out: torch.Tensor, weight: Nf4Tensor) -> None:
    """out [N, K] = the values of `weight`, in fp32 or bf16."""
    entry = library.QtWeight()
    _fill_weight(entry, weight, out.dtype)
    context.call("qt_nf4_dequantize", _CODES[out.dtype], pointer(out), ctypes.byref(entry))


def peak_product(context: Context, dtype: torch.dtype, iterations: int = 1 << 18) -> float:
    """Products from registers on every thread and nothing else; returns their FLOPs. What the kernels could reach if
    memory and bookkeeping were free."""
    flops = ctypes.c_double()
    context.call("qt_peak", _CODES[dtype], iterations, ctypes.byref(flops))
    return flops.value


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """The address of a tensor's data, None for None. KernelError unless it is contiguous, on the CPU, of `dtype`."""
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or (dtype is not None and tensor.dtype != dtype):
        raise KernelError(
            f"native op: want a contiguous CPU tensor{f' of {dtype}' if dtype else ''}, got {tuple(tensor.shape)} "
            f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        )
    return int(tensor.data_ptr())


def _group(
    linears: Sequence[Linear],
    outs: Sequence[torch.Tensor | None],
    us: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
) -> ctypes.Array[library.QtLinear]:
    group = (library.QtLinear * len(linears))()
    for entry, linear, out, u in zip(group, linears, outs, us, strict=True):
        _fill_weight(entry.weight, linear.weight, dtype)
        entry.bias, entry.out = pointer(linear.bias, dtype), pointer(out, dtype)
        if (lora := linear.lora) is not None:
            entry.lora_a, entry.lora_b = pointer(lora.A, dtype), pointer(lora.B, dtype)
            entry.grad_a, entry.grad_b = pointer(lora.dA, torch.float32), pointer(lora.dB, torch.float32)
            entry.u, entry.rank = pointer(u, dtype), lora.rank
            entry.scale, entry.index = lora.scale, lora.index
    return group


def _fill_weight(entry: library.QtWeight, weight: Nf4Tensor | torch.Tensor, dtype: torch.dtype) -> None:
    entry.n, entry.k = weight.shape
    if isinstance(weight, torch.Tensor):
        entry.dense = pointer(weight, dtype)
        return
    entry.codes, entry.absmax = pointer(weight.codes), pointer(weight.absmax)
    entry.absmax_codes, entry.absmax2 = pointer(weight.absmax_codes), pointer(weight.absmax2)
    entry.code2 = pointer(weight.code2)
    entry.offset = 0.0 if weight.offset is None else float(weight.offset)


def _dropout(dropout: Dropout | None) -> object:
    keys = None if dropout is None else pointer(dropout.keys, torch.int64)
    return ctypes.byref(library.QtDropout(keys, 0.0 if dropout is None else dropout.p))


def _rows(cu_seqlens: Sequence[int]) -> tuple[object, int]:
    return (ctypes.c_int64 * len(cu_seqlens))(*cu_seqlens), len(cu_seqlens) - 1


def _attention(q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None) -> object:
    return ctypes.byref(library.QtAttention(q.shape[1], k.shape[1], q.shape[2], window or 0, scale))
