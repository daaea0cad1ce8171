"""Linear layers on the GPU, one product a layer with everything else in its epilogue.

Legend: T tokens, K in_features, N out_features, R rank.

Three ways to the same numbers, chosen by shape from a table (`ops/triton_configs.PRODUCTS`):

    dense   the weight dequantised into scratch, then our product; the adapter's B (backward: A) is its last K-step
    blas    the weight dequantised into scratch, cuBLAS for the product, then our kernel without a K-loop for the rest
    fused   our product reads NF4 and dequantises tile by tile: for few tokens, and where scratch holds no weight
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.triton import keep, mask_arguments, token_bits
from quatrain.ops.linear_lora import Linear
from quatrain.ops.linear_lora.triton_lora import lora_down, lora_grads, lora_up_grad, rank_block
from quatrain.ops.nf4 import BLOCK, Nf4Tensor
from quatrain.ops.nf4.triton import NESTED, PLAIN, arguments, block_scale, decode, dequantize
from quatrain.ops.triton_configs import Case, config, config_for, product_path
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import Part, carved_bytes

GROUP = 8
"""Blocks of rows that run side by side, so that they share the weight's tiles in the second-level cache."""


@triton.jit
def grouped_block(rows, columns, GROUP: tl.constexpr):
    """(row block, column block) of this program: column after column within GROUP rows of blocks."""
    pid = tl.program_id(0)
    first = pid // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    inside = pid % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def nf4_tile(
    codes, absmax, absmax_codes, absmax2, offset, code2, table, n, k0, K, dtype: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """[ROWS, 64] of the weight in `dtype`, from row numbers n int64 [ROWS] and column k0: one block of codes a row."""
    block = n * (K // 64) + k0 // 64
    scale = block_scale(block, block >= 0, absmax, absmax_codes, absmax2, offset, code2)
    packed = tl.load(codes + block[:, None] * 32 + tl.arange(0, 32)[None, :])
    return (decode(packed, tl.load(table + tl.arange(0, 16)), ROWS) * scale[:, None]).to(dtype)


@triton.jit
def linear_forward_kernel(
    out, x, weight, codes, absmax, absmax_codes, absmax2, offset, code2, table, bias, u, B, residual, scale, T, N, K, R,
    ACCUMULATE: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x W^T + bias + scale * u B^T + residual (+ out with ACCUMULATE). EVEN: BLOCK_K divides K."""
    t_block, n_block = grouped_block(tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N), GROUP)
    t = t_block * BLOCK_T + tl.arange(0, BLOCK_T)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, columns = (t % T).to(tl.int64), (n % N).to(tl.int64)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if codes is not None:
            a = tl.load(x + rows[:, None] * K + k[None, :])
            w = nf4_tile(
                codes, absmax, absmax_codes, absmax2, offset, code2, table, columns, k0, K, x.dtype.element_ty, BLOCK_N
            )
        elif EVEN:
            a = tl.load(x + rows[:, None] * K + k[None, :])
            w = tl.load(weight + columns[:, None] * K + k[None, :])
        else:
            a = tl.load(x + rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            w = tl.load(weight + columns[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        acc = tl.dot(a, w.T, acc, input_precision="ieee")
    if u is not None:
        acc *= 1 / scale  # so that the product goes on with plain u and B, whose roundings are the reference's
        for r0 in tl.range(0, R, BLOCK_R, num_stages=1):
            r = r0 + tl.arange(0, BLOCK_R)
            a = tl.load(u + rows[:, None] * R + r[None, :], mask=r[None, :] < R, other=0.0)
            b = tl.load(B + columns[:, None] * R + r[None, :], mask=r[None, :] < R, other=0.0)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        acc *= scale
    inside = (t[:, None] < T) & (n[None, :] < N)
    at = t.to(tl.int64)[:, None] * N + n[None, :]
    if bias is not None:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    if ACCUMULATE:
        acc += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["index_mix", "threshold"])
def linear_backward_kernel(
    dx, dout, weight, codes, absmax, absmax_codes, absmax2, offset, code2, table, du, A, keys, index_mix, threshold,
    factor, T, N, K, R, ACCUMULATE: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dx [T, K] = dout W + mask * (du A) (+ dx with ACCUMULATE). EVEN: BLOCK_N divides N."""
    t_block, k_block = grouped_block(tl.cdiv(T, BLOCK_T), tl.cdiv(K, BLOCK_K), GROUP)
    t = t_block * BLOCK_T + tl.arange(0, BLOCK_T)
    k = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    rows, columns = (t % T).to(tl.int64), k % K
    acc = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        there = (n % N).to(tl.int64)  # rows beyond the last meet a zero of dout
        if codes is not None:
            w = nf4_tile(
                codes, absmax, absmax_codes, absmax2, offset, code2, table, there, k_block * BLOCK_K, K,
                dout.dtype.element_ty, BLOCK_N,
            )  # fmt: skip
        else:
            w = tl.load(weight + there[:, None] * K + columns[None, :])
        if EVEN:
            d = tl.load(dout + rows[:, None] * N + n[None, :])
        else:
            d = tl.load(dout + rows[:, None] * N + n[None, :], mask=n[None, :] < N, other=0.0)
        acc = tl.dot(d, w, acc, input_precision="ieee")
    if du is not None:
        up = tl.zeros((BLOCK_T, BLOCK_K), tl.float32) if keys is not None else acc
        for r0 in tl.range(0, R, BLOCK_R, num_stages=1):
            r = r0 + tl.arange(0, BLOCK_R)
            d = tl.load(du + rows[:, None] * R + r[None, :], mask=r[None, :] < R, other=0.0)
            a = tl.load(A + r[:, None] * K + columns[None, :], mask=r[:, None] < R, other=0.0)
            up = tl.dot(d, a, up, input_precision="ieee")
        if keys is not None:
            token = token_bits(keys, index_mix, rows)[:, None]
            acc += tl.where(keep(token, k[None, :], threshold), up * factor, 0.0)
        else:
            acc = up
    inside = (t[:, None] < T) & (k[None, :] < K)
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    if ACCUMULATE:
        acc += tl.load(dx + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=inside)


def linear_lora_forward(
    outs: Sequence[torch.Tensor],
    us: Sequence[torch.Tensor | None],
    x: torch.Tensor,
    linears: Sequence[Linear],
    dropout: Dropout | None,
    scratch: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """outs[i] [T, N_i] = and us[i] [T, R] = (None without an adapter), from x [T, K]. `residual` [T, N_0], for a group
    of one, is added. `scratch`: see `ops/triton_sizes`; where it has no room for a weight, NF4 is read in place."""
    contiguous("linear_lora_forward", x, residual, scratch, *outs, *us)
    lora_down_forward(us, x, linears, dropout)
    for out, u, linear in zip(outs, us, linears, strict=True):
        path, weight = _weight(linear, x, scratch)
        if path == "blas":
            assert weight is not None
            torch.mm(x, weight.T, out=out)
            if u is None and linear.bias is None and residual is None:
                continue
        _launch_forward(path, out, u, x, weight, linear, residual)


def lora_down_forward(
    us: Sequence[torch.Tensor | None], x: torch.Tensor, linears: Sequence[Linear], dropout: Dropout | None
) -> None:
    """us[i] [T, R] = (None without an adapter), from x [T, K]."""
    contiguous("lora_down_forward", x, *us)
    for u, linear in zip(us, linears, strict=True):
        if u is not None and linear.lora is not None:
            lora_down(u, x, linear.lora, dropout)


def linear_lora_backward(
    dx: torch.Tensor,
    douts: Sequence[torch.Tensor],
    x: torch.Tensor,
    us: Sequence[torch.Tensor | None],
    linears: Sequence[Linear],
    dropout: Dropout | None,
    scratch: torch.Tensor,
) -> None:
    """dx [T, K] = and every adapter's dA, dB +=, from douts[i] [T, N_i] and what the forward read and wrote."""
    contiguous("linear_lora_backward", dx, x, scratch, *douts, *us)
    for i, (dout, u, linear) in enumerate(zip(douts, us, linears, strict=True)):
        du, rest = None, scratch
        if u is not None and linear.lora is not None:
            du_part: Part = ((x.shape[0], linear.lora.rank), x.dtype)
            (du,) = carve("linear_lora_backward", scratch, du_part)
            rest = scratch[carved_bytes(du_part) :]
            lora_up_grad(du, dout, linear.lora)
            lora_grads(dout, x, u, du, linear.lora, dropout, rest)
        path, weight = _weight(linear, x, rest)  # over the gradients' partial sums, which are done with
        if path == "blas":
            assert weight is not None
            torch.mm(dout, weight, out=dx) if i == 0 else dx.addmm_(dout, weight)
            if du is None:
                continue
        _launch_backward(path, dx, dout, weight, du, linear, dropout, accumulate=i > 0 or path == "blas")


def _weight(linear: Linear, x: torch.Tensor, scratch: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    """(path, the weight [N, K] in the compute dtype, or None for "fused")."""
    weight = linear.weight
    n, k = weight.shape
    if not isinstance(weight, Nf4Tensor):
        return product_path(x, n, fused=False), weight
    path = product_path(x, n, fused=k % BLOCK == 0)
    part: Part = ((n, k), x.dtype)
    if path == "fused" or (k % BLOCK == 0 and scratch.numel() < carved_bytes(part)):
        return "fused", None
    (dense,) = carve("linear_lora", scratch, part)
    dequantize(dense, weight)
    return path, dense


def _launch_forward(
    path: str,
    out: torch.Tensor,
    u: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    linear: Linear,
    residual: torch.Tensor | None,
) -> None:
    (tokens, n), lora, k = out.shape, linear.lora, 0 if path == "blas" else x.shape[1]
    rank = 0 if u is None else u.shape[1]
    how = config_for(f"linear_forward/{path}", x) | {"BLOCK_R": rank_block(rank)}
    grid = (triton.cdiv(tokens, how["BLOCK_T"]) * triton.cdiv(n, how["BLOCK_N"]),)
    linear_forward_kernel[grid](
        out, x, weight, *_codes(path, linear), linear.bias, u, lora.B if lora else None, residual,
        lora.scale if lora else 1.0, tokens, n, k, rank,
        ACCUMULATE=path == "blas", EVEN=k % how["BLOCK_K"] == 0, GROUP=GROUP, **how,
    )  # fmt: skip


def _launch_backward(
    path: str,
    dx: torch.Tensor,
    dout: torch.Tensor,
    weight: torch.Tensor | None,
    du: torch.Tensor | None,
    linear: Linear,
    dropout: Dropout | None,
    accumulate: bool,
) -> None:
    (tokens, k), lora, n = dx.shape, linear.lora, 0 if path == "blas" else dout.shape[1]
    keys, index_mix, threshold, factor = mask_arguments(dropout if lora else None, lora.index if lora else 0)
    rank = 0 if du is None else du.shape[1]
    how = config_for(f"linear_backward/{path}", dx) | {"BLOCK_R": rank_block(rank)}
    grid = (triton.cdiv(tokens, how["BLOCK_T"]) * triton.cdiv(k, how["BLOCK_K"]),)
    linear_backward_kernel[grid](
        dx, dout, weight, *_codes(path, linear), du, lora.A if lora else None, keys, index_mix, threshold, factor,
        tokens, n, k, rank, ACCUMULATE=accumulate, EVEN=n % how["BLOCK_N"] == 0, GROUP=GROUP, **how,
    )  # fmt: skip


def _codes(path: str, linear: Linear) -> tuple[torch.Tensor | None, ...]:
    return arguments(linear.weight) if path == "fused" and isinstance(linear.weight, Nf4Tensor) else (None,) * 7


def cases(arch: str, dtype: str) -> list[Case]:
    made = []
    d, sizes = f"*{dtype}", "i32:16 i32:16 i32:16"
    lora_f, lora_b = f"{d} {d}", f"{d} {d} - i32 i32 fp32"
    block = {"GROUP": GROUP, "EVEN": True, "BLOCK_R": 16}
    weights = {"dense": f"{d} - - - - - - -", "blas": f"{d} - - - - - - -"}
    weights |= {"fused": f"- {NESTED}", "fused plain": f"- {PLAIN}"}
    for name, words in weights.items():
        path = name.split()[0]
        forward = block | config(f"linear_forward/{path}", arch, dtype) | {"ACCUMULATE": path == "blas"}
        backward = block | config(f"linear_backward/{path}", arch, dtype) | {"ACCUMULATE": path == "blas"}
        adapted = f"{d} {d} {words} - {lora_f} - fp32 {sizes} i32:16"
        made.append(Case(linear_forward_kernel, adapted, forward, f"{name} lora"))
        made.append(Case(linear_backward_kernel, f"{d} {d} {words} {lora_b} {sizes} i32:16", backward, f"{name} lora"))
        if path == "blas":
            continue
        everything = f"{d} {d} {words} {d} {lora_f} {d} fp32 {sizes} i32:16"
        wide = {"BLOCK_R": 32}
        made.append(Case(linear_forward_kernel, everything, forward | wide, f"{name} bias lora residual r=64"))
        dropout = f"{d} {d} {words} {d} {d} *i64 i32 i32 fp32 {sizes} i32:16"
        summed = backward | wide | {"ACCUMULATE": True}
        made.append(Case(linear_backward_kernel, dropout, summed, f"{name} lora dropout r=64 sum"))
        made.append(Case(linear_forward_kernel, f"{d} {d} {words} - - - - fp32 {sizes} i32:16", forward, name))
    return made
