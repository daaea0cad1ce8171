"""AdamW in plain torch, without a host read."""

from __future__ import annotations

import torch

from quatrain.ops.rows import row_chunks

CHUNK = 1 << 18


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
) -> None:
    """param, exp_avg, exp_avg_sq [P] updated in place from grad [P]; scale, lr [] floating, step [] int64, skip []
    bool."""
    beta1, beta2 = betas
    t = (step + 1).to(torch.float64)
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    decay = (1 - lr * weight_decay).to(param.dtype)
    step_size = (lr / correction1).to(param.dtype)
    root_correction2 = correction2.sqrt().to(param.dtype)
    for part in row_chunks(param.shape[0], CHUNK):
        p, m, v = param[part], exp_avg[part], exp_avg_sq[part]
        g = grad[part] * scale.to(grad.dtype)
        new_m = m * beta1 + g * (1 - beta1)
        new_v = v * beta2 + g.square() * (1 - beta2)
        update = new_m / (new_v.sqrt() / root_correction2 + eps)
        p.copy_(torch.where(skip, p, p * decay - step_size * update))
        m.copy_(torch.where(skip, m, new_m))
        v.copy_(torch.where(skip, v, new_v))
