"""AdamW on one flat segment (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), all inputs on the device.

    g = grad * scale                                     t = step + 1
    m = beta1 m + (1 - beta1) g                          v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

With `skip` set nothing changes: parameters and moments keep their bits. `step` counts the updates done so far and is
advanced by the engine, once for all segments.
"""
