"""The thin products of an adapter: down to its rank and back, and the gradients of A and B.

Legend: T tokens, K in_features, N out_features, R rank, C either of K and N, S parts of the tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.triton import keep, mask_arguments, token_bits
from quatrain.ops.linear_lora import Lora
from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import carve
from quatrain.ops.triton_sizes import lora_partials, token_split
from quatrain.ops.triton_sum import add_partials


@triton.jit(do_not_specialize=["index_mix", "threshold"])
def lora_down_kernel(
    u, x, matrix, keys, index_mix, threshold, scale, T, K, R, stride_r, stride_k,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u [T, R] = scale * (kept x) M^T, with M[r, k] at r * stride_r + k * stride_k."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = (t % T).to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    if keys is not None:
        token = token_bits(keys, index_mix, t % T)[:, None]
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        values = tl.load(x + rows * K + k[None, :], mask=k[None, :] < K, other=0.0)
        if keys is not None:
            values = tl.where(keep(token, k[None, :], threshold), values, 0.0)
        inside = (r[:, None] < R) & (k[None, :] < K)
        m = tl.load(matrix + r[:, None] * stride_r + k[None, :] * stride_k, mask=inside, other=0.0)
        acc = tl.dot(values, m.T, acc, input_precision="ieee")
    inside = (t[:, None] < T) & (r[None, :] < R)
    tl.store(u + t.to(tl.int64)[:, None] * R + r[None, :], (acc * scale).to(u.dtype.element_ty), mask=inside)


@triton.jit
def product_over_tokens(
    out, left, right, keys, index_mix, threshold, scale, c_block, start, end, C, R, stride_r, stride_c,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out = scale * left^T (kept right) over the tokens from start to end, for one block of the columns of left [T, R]
    and right [T, C]; the element (r, c) of out lies at r * stride_r + c * stride_c."""
    c = c_block * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for t0 in range(start, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        rows, there = t.to(tl.int64)[:, None], t[:, None] < end
        a = tl.load(left + rows * R + r[None, :], mask=there & (r[None, :] < R), other=0.0)
        b = tl.load(right + rows * C + c[None, :], mask=there & (c[None, :] < C), other=0.0)
        if keys is not None:
            token = token_bits(keys, index_mix, tl.minimum(t, end - 1))[:, None]
            b = tl.where(keep(token, c[None, :], threshold), b, 0.0)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    tl.store(out + r[:, None] * stride_r + c[None, :] * stride_c, acc * scale, mask=(r[:, None] < R) & (c[None, :] < C))


@triton.jit(do_not_specialize=["index_mix", "threshold"])
def lora_grad_kernel(
    partials, dout, x, u, du, keys, index_mix, threshold, factor, scale, T, K, N, R, split,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """partials [S, R * K + N * R]: dA, then dB, of `split` tokens each. Programs go over A's columns, then B's."""
    start = tl.program_id(2) * split
    end = min(start + split, T)
    part = partials + tl.program_id(2).to(tl.int64) * R * (K + N)
    block, of_a = tl.program_id(0), tl.cdiv(K, BLOCK_C)
    if block < of_a:
        product_over_tokens(
            part, du, x, keys, index_mix, threshold, factor, block, start, end, K, R, K, 1, BLOCK_T, BLOCK_C, BLOCK_R
        )
    else:
        product_over_tokens(
            part + R * K, u, dout, None, 0, 0, scale, block - of_a, start, end, N, R, 1, R, BLOCK_T, BLOCK_C, BLOCK_R
        )


def lora_down(u: torch.Tensor, x: torch.Tensor, lora: Lora, dropout: Dropout | None) -> None:
    """u [T, R] = (mask * x) A^T. What the mask scales the survivors by is applied to the sum."""
    keys, index_mix, threshold, factor = mask_arguments(dropout, lora.index)
    _thin_product(u, x, lora.A, (lora.A.stride(0), 1), keys, index_mix, threshold, factor)


def lora_up_grad(du: torch.Tensor, dout: torch.Tensor, lora: Lora) -> None:
    """du [T, R] = scale * dout B."""
    _thin_product(du, dout, lora.B, (1, lora.B.stride(0)), None, 0, 0, lora.scale)


def _thin_product(
    u: torch.Tensor,
    x: torch.Tensor,
    matrix: torch.Tensor,
    strides: tuple[int, int],
    keys: torch.Tensor | None,
    index_mix: int,
    threshold: int,
    scale: float,
) -> None:
    how = config_for("lora_down", x) | {"BLOCK_R": rank_block(u.shape[1])}
    tokens, k = x.shape
    grid = (triton.cdiv(tokens, how["BLOCK_T"]), triton.cdiv(u.shape[1], how["BLOCK_R"]))
    lora_down_kernel[grid](
        u, x, matrix, keys, index_mix, threshold, scale, tokens, k, u.shape[1], *strides, **how
    )  # fmt: skip


def lora_grads(
    dout: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    du: torch.Tensor,
    lora: Lora,
    dropout: Dropout | None,
    scratch: torch.Tensor,
) -> None:
    """lora.dA [R, K] += du^T (mask * x) and lora.dB [N, R] += scale * dout^T u, summed in fp32."""
    (tokens, k), n, rank = x.shape, dout.shape[1], lora.rank
    how = config_for("lora_grad", x) | {"BLOCK_R": rank_block(rank)}
    parts, split = token_split(tokens, k + n)
    (partials,) = carve("lora_grads", scratch, lora_partials(tokens, k + n, rank))
    blocks = triton.cdiv(k, how["BLOCK_C"]) + triton.cdiv(n, how["BLOCK_C"])
    lora_grad_kernel[(blocks, triton.cdiv(rank, how["BLOCK_R"]), parts)](
        partials, dout, x, u, du, *mask_arguments(dropout, lora.index), lora.scale, tokens, k, n, rank, split, **how
    )
    add_partials(partials, lora.dA, lora.dB)


def rank_block(rank: int) -> int:
    """Columns of an adapter that a program works on: a power of two that `tl.dot` takes."""
    return max(16, min(32, int(triton.next_power_of_2(rank))))


def cases(arch: str, dtype: str) -> list[Case]:
    made = []
    d, sizes = f"*{dtype}", "i32:16 i32:16 i32:16"
    for rank in (16, 64):
        block = {"BLOCK_R": rank_block(rank)}
        down, grad = config("lora_down", arch, dtype) | block, config("lora_grad", arch, dtype) | block
        for variant, keys in (("", "-"), ("dropout ", "*i64")):
            name, mask = f"{variant}r={rank}", f"{keys} i32 i32 fp32"
            made.append(Case(lora_down_kernel, f"{d} {d} {d} {mask} {sizes} i32:16 1", down, f"u {name}"))
            made.append(Case(lora_grad_kernel, f"*fp32 {d} {d} {d} {d} {mask} fp32 {sizes} i32:16 i32:16", grad, name))
        made.append(Case(lora_down_kernel, f"{d} {d} {d} - i32 i32 fp32 {sizes} 1 i32:16", down, f"du r={rank}"))
    return made
