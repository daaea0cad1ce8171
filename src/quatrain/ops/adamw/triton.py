"""AdamW on the GPU. Everything that changes from step to step is read from device memory; betas, eps and decay, which
never change, are constants of the kernel, so that they keep their fp64 digits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import contiguous


@triton.jit
def power(base: tl.constexpr, t):
    """base^t in fp64, for a constant base in [0, 1) and t fp64 of at least 1."""
    return t * 0 if base == 0 else tl.exp(t * tl.log(tl.full((), base, tl.float64)))


@triton.jit
def adamw_kernel(
    param, exp_avg, exp_avg_sq, grad, copy, scale, skip, lr, step, n,
    beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, weight_decay: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    update = at < n * (1 - tl.load(skip).to(tl.int32))
    t = (tl.load(step) + 1).to(tl.float64)
    rate = tl.load(lr)
    decay = (1 - rate * weight_decay).to(tl.float32)
    step_size = (rate / (1 - power(beta1, t))).to(tl.float32)
    root_correction2 = tl.sqrt(1 - power(beta2, t)).to(tl.float32)
    g = tl.load(grad + at, mask=update, other=0.0) * tl.load(scale).to(tl.float32)
    p = tl.load(param + at, mask=update, other=0.0)
    m = tl.load(exp_avg + at, mask=update, other=0.0) * beta1 + g * (1 - beta1)
    v = tl.load(exp_avg_sq + at, mask=update, other=0.0) * beta2 + g * g * (1 - beta2)
    p = p * decay - step_size * (m / (tl.sqrt_rn(v) / root_correction2 + eps))
    tl.store(param + at, p, mask=update)
    tl.store(exp_avg + at, m, mask=update)
    tl.store(exp_avg_sq + at, v, mask=update)
    if copy is not None:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=update)


def adamw_step(
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
    copy: torch.Tensor | None = None,
) -> None:
    """param, exp_avg, exp_avg_sq fp32 [P] updated in place from grad fp32 [P]; scale, lr fp64 [], step int64 [], skip
    bool []. `copy` [P], in the compute dtype, is written with the new parameters; a skipped step leaves it alone."""
    contiguous("adamw_step", param, exp_avg, exp_avg_sq, grad, copy, scale, skip, lr, step)
    how = config_for("elementwise", param)
    adamw_kernel[(triton.cdiv(param.numel(), how["BLOCK"]),)](
        param, exp_avg, exp_avg_sq, grad, copy, scale, skip, lr, step, param.numel(), *betas, eps, weight_decay, **how
    )


def cases(arch: str, dtype: str) -> list[Case]:
    how = config("elementwise", arch, dtype) | {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    copy = "-" if dtype == "fp32" else f"*{dtype}"
    return [Case(adamw_kernel, f"*fp32 *fp32 *fp32 *fp32 {copy} *fp64 *i1 *fp64 *i64 i32:16", how)]
