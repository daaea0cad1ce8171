"""Gradient norm and clip factor, on the device: neither ever visits the host inside a step.

The gradients hold the sum over all supervised tokens of the optimizer step; N is their count.

    out[slot] = sum(grad^2)                                      one slot for each segment
    norm      = sqrt(sum(out)) / N                               the norm of the mean gradient, before clipping
    scale     = min(1, max_norm / (norm + 1e-6)) / N             what AdamW multiplies every gradient by
    skip      = norm or loss is not finite, or N is 0            then scale is 0 and the update must change nothing

The factor is that of torch.nn.utils.clip_grad_norm_. All outputs are `=`.
"""
