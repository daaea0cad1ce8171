"""Which implementation of each op a run uses.

`Ops` is the whole vocabulary of the engine. The block calls `ops.<name>` and never an implementation, so that a
device's kernels, the profiler's timers or a recording stand-in can take the place of any of them. A `Backend` says what
memory its ops need for given sizes and binds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quatrain.errors import KernelError
from quatrain.ops.rows import CHUNK

if TYPE_CHECKING:
    import torch

    from quatrain.ops.nf4 import Nf4Tensor


REFERENCE_LOGITS_BYTES = 32 << 20
"""About the size of a chunk of logits: large enough for an efficient product, small beside the model."""


@dataclass(frozen=True)
class Ops:
    """One callable per op; signatures and formulas are in the op's package, less the scratch that is bound."""

    embedding_forward: Callable[..., None]
    rope_tables: Callable[..., None]
    rope_forward: Callable[..., None]
    rope_backward: Callable[..., None]
    dropout_keys: Callable[..., None]
    rms_norm_forward: Callable[..., None]
    rms_norm_backward: Callable[..., None]
    linear_lora_forward: Callable[..., None]
    linear_lora_backward: Callable[..., None]
    linear_lora_decode: Callable[..., None]
    lora_down_forward: Callable[..., None]
    attention_forward: Callable[..., None]
    attention_backward: Callable[..., None]
    cached_attention_forward: Callable[..., None]
    sample_tokens: Callable[..., None]
    swiglu_forward: Callable[..., None]
    swiglu_backward: Callable[..., None]
    head_loss: Callable[..., None]
    sum_squares: Callable[..., None]
    clip_scale: Callable[..., None]
    adamw_step: Callable[..., None]


@dataclass(frozen=True)
class Sizes:
    """The largest sizes an op will be called with. `groups` are the linears that share an input: (in_features,
    (out_features, ...)); `rank` is the widest adapter's; `head_tiled`: the head comes as `HeadTiles`."""

    tokens: int
    longest_row: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    rank: int
    quantised: bool
    dropout: bool
    head_chunk: int
    dtype: torch.dtype
    wide: torch.dtype
    head_tiled: bool = False


@dataclass(frozen=True)
class Backend:
    """A set of ops before it has memory. `reason` says in one sentence why this one was taken."""

    name: str
    reason: str
    scratch_bytes: Callable[[Sizes], int]
    """Of the one scratch slot that all ops share: no two run at once."""
    temporary_bytes: Callable[[Sizes], int]
    """The most that one op allocates by itself while it runs."""
    bind: Callable[[torch.Tensor], Ops]
    """The ops over a scratch tensor, uint8 [at least scratch_bytes]."""
    decode_scratch_bytes: Callable[[Sizes], int]
    """Of the same for a decoding step of `tokens` rows over `longest_row` slots."""
    capture: Callable[[torch.Tensor, Callable[[Ops], None]], Callable[[], None]]
    """(scratch, run) -> what repeats the op calls of `run(ops)`, which is run once. Only those are sure to be
    repeated, on the same tensors."""
    quantize: Callable[..., Nf4Tensor]
    """(weight, *, double_quant) -> the weight in NF4: see ops/nf4/reference.py."""
    quantize_error: Callable[[Nf4Tensor, torch.Tensor], float]
    """(NF4, weight) -> the relative error of the one against the other."""
    dequantize: Callable[[torch.Tensor, Nf4Tensor], None]
    """out [N, K] = the values of a weight in NF4, in out's dtype."""
    peak_product: Callable[[torch.dtype], Callable[[], float]]
    """For a dtype: work that is nothing but products and returns their FLOPs (see profile/limits.py)."""
    head_chunk: Callable[[int, int], int]
    """(hidden size, vocabulary) -> supervised rows that the head works on at a time."""
    keeps_logits: bool = True
    """Whether the head needs room for a chunk of logits."""
    own_threads: bool = False
    """The ops have a thread pool of their own."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around calls of the ops. Torch's threads spin for a while after each op of theirs, on the cores that the
        backend's own threads want: torch works alone meanwhile."""
        import torch

        threads = torch.get_num_threads()
        if self.own_threads:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def select_backend(device: str, dtype: torch.dtype, kernels: str = "auto", threads: int = 1) -> Backend:
    """The ops for a device ("cpu" or "cuda") and an activation dtype.

    `kernels`, for the CPU: "auto" is the strongest instruction set that build and machine share, or the reference ops
    where there is none; "reference" or the name of an instruction set asks for that one. Raises KernelError for what is
    not there."""
    if device == "cuda":
        return _cuda(dtype, kernels)
    if device != "cpu":
        raise KernelError(f"no kernels for device {device!r}: want cpu or cuda", hint="use --device cpu")
    if kernels == "reference":
        return _reference("as asked")
    from quatrain.ops import library

    there, reason = library.available()
    if kernels == "auto" and not there:
        return _reference(reason)
    from quatrain.ops import native
    from quatrain.ops.nf4.native import quantize, relative_error

    if dtype not in native.DTYPES:
        if kernels == "auto":
            return _reference(f"native kernels compute in bf16 and fp32, not {dtype}")
        raise KernelError(f"kernels {kernels!r}: want fp32 or bf16, got {dtype}", hint="use --kernels reference")
    isa = library.best_isa() if kernels == "auto" else kernels
    context = library.context(isa, threads)
    return Backend(
        f"native {isa}",
        f"{reason}, {threads} threads" if kernels == "auto" else "as asked",
        partial(native.scratch_bytes, context),
        lambda sizes: 0,
        partial(native.native_ops, context),
        partial(native.decode_scratch_bytes, context),
        partial(native.capture, context),
        partial(quantize, context),
        partial(relative_error, context),
        partial(native.dequantize, context),
        lambda dtype: partial(native.peak_product, context, dtype),
        head_chunk=native.head_chunk,
        keeps_logits=False,
        own_threads=True,
    )


def _cuda(dtype: torch.dtype, kernels: str) -> Backend:
    """The Triton kernels on this machine's GPU. Raises KernelError where something they need is missing."""
    import torch

    if kernels != "auto":
        raise KernelError(f"kernels {kernels!r} are for the CPU", hint="use --kernels auto, or --device cpu")
    if not torch.cuda.is_available():
        raise KernelError(f"device cuda: torch {torch.__version__} sees no GPU", hint="use --device cpu")
    if not find_spec("triton"):
        raise KernelError("device cuda: Triton is not installed", hint="pip install triton, or use --device cpu")
    from quatrain.ops.triton_configs import architecture

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums are fp32, in cuBLAS too
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return triton_backend(dtype, architecture(torch.device("cuda", torch.cuda.current_device())))


def triton_backend(dtype: torch.dtype, arch: str) -> Backend:
    """The Triton kernels for an architecture (`ops/triton_configs.CLASSES`). Making one needs neither a GPU nor Triton:
    a plan can be made anywhere. Raises KernelError for a dtype that the architecture has no kernels for."""
    import torch

    from quatrain.ops import triton_sizes
    from quatrain.profile.limits import matrix_product

    known = [torch.float32, torch.float16, *([] if arch == "sm_75" else [torch.bfloat16])]
    if dtype not in known:
        names = ", ".join(str(one).removeprefix("torch.") for one in known)
        raise KernelError(f"Triton kernels for {arch}: want {names}, got {dtype}", hint="use --compute-dtype fp16")

    def late(name: str) -> Callable[..., Any]:
        def call(*args: object, **more: object) -> Any:
            return getattr(import_module("quatrain.ops.triton_backend"), name)(*args, **more)

        return call

    bind = late("triton_ops")
    return Backend(
        f"triton {arch}", "the GPU's own kernels", triton_sizes.scratch_bytes, lambda sizes: 0, bind,
        triton_sizes.decode_scratch_bytes, partial(_plain_capture, bind), late("quantize"), late("relative_error"),
        late("dequantize"), partial(matrix_product, size=8192, device="cuda"),
        head_chunk=triton_sizes.head_chunk,
    )  # fmt: skip


def _reference(reason: str) -> Backend:
    from quatrain.ops.nf4.reference import dequantize, quantize, relative_error
    from quatrain.profile.limits import matrix_product

    return Backend(
        "reference", reason, _reference_scratch, _reference_temporaries, reference_ops, _reference_scratch,
        partial(_plain_capture, reference_ops), quantize, relative_error, dequantize, matrix_product,
        head_chunk=lambda hidden, vocab: max(16, min(1024, REFERENCE_LOGITS_BYTES // (4 * vocab))),
    )  # fmt: skip


def _plain_capture(
    bind: Callable[[torch.Tensor], Ops], scratch: torch.Tensor, run: Callable[[Ops], None]
) -> Callable[[], None]:
    """The `capture` of ops that have nothing better: the repetition is `run` itself."""
    ops = bind(scratch)
    run(ops)
    return partial(run, ops)


def reference_ops(scratch: torch.Tensor) -> Ops:
    """Every op's torch implementation; `scratch` holds one dequantised weight."""
    from quatrain.ops.adamw.reference import adamw_step
    from quatrain.ops.attention.cached import cached_attention_forward
    from quatrain.ops.attention.reference import attention_backward, attention_forward
    from quatrain.ops.dropout.reference import dropout_keys
    from quatrain.ops.embedding.reference import embedding_forward
    from quatrain.ops.grad_norm.reference import clip_scale, sum_squares
    from quatrain.ops.head_loss.reference import head_loss
    from quatrain.ops.linear_lora.reference import linear_lora_backward, linear_lora_forward, lora_down_forward
    from quatrain.ops.rmsnorm.reference import rms_norm_backward, rms_norm_forward
    from quatrain.ops.rope.reference import rope_backward, rope_forward, rope_tables
    from quatrain.ops.sampling.reference import sample_tokens
    from quatrain.ops.swiglu.reference import swiglu_backward, swiglu_forward

    return Ops(
        embedding_forward=embedding_forward,
        rope_tables=rope_tables,
        rope_forward=rope_forward,
        rope_backward=rope_backward,
        dropout_keys=dropout_keys,
        rms_norm_forward=rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        linear_lora_forward=partial(linear_lora_forward, scratch=scratch),
        linear_lora_backward=partial(linear_lora_backward, scratch=scratch),
        linear_lora_decode=partial(linear_lora_forward, scratch=scratch),
        lora_down_forward=lora_down_forward,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        cached_attention_forward=cached_attention_forward,
        sample_tokens=sample_tokens,
        swiglu_forward=swiglu_forward,
        swiglu_backward=swiglu_backward,
        head_loss=head_loss,
        sum_squares=sum_squares,
        clip_scale=clip_scale,
        adamw_step=adamw_step,
    )


def _reference_scratch(sizes: Sizes) -> int:
    """One dequantised weight."""
    largest = max(k * max(ns) for k, ns in sizes.groups)
    return largest * sizes.dtype.itemsize if sizes.quantised else 0


def _reference_temporaries(sizes: Sizes) -> int:
    """The op with the most; each formula counts the tensors alive at that op's peak."""
    from quatrain.ops.attention.reference import SCORE_BYTES

    w, c = sizes.wide.itemsize, sizes.dtype.itemsize
    longest_k = max(k for k, _ in sizes.groups)
    longest_n = max(max(ns) for _, ns in sizes.groups)
    kv, heads = sizes.kv_heads * sizes.head_dim, sizes.heads * sizes.head_dim
    scores = max(SCORE_BYTES, 16 * sizes.heads * sizes.longest_row * 4) * w // 4
    attention = 3 * scores + (4 * sizes.longest_row * kv + 4 * CHUNK * heads) * w
    adapters = CHUNK * (longest_n + 3 * longest_k) * w + sizes.rank * (longest_n + longest_k) * w
    swiglu = 7 * CHUNK * sizes.intermediate * w
    head = 2 * math.prod((sizes.head_chunk, sizes.vocab, c)) if c < w else 0
    return max(attention, adapters, swiglu, head)
