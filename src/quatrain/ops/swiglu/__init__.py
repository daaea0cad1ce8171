"""SwiGLU's gate (Shazeer 2020, arXiv:2002.05202): silu(gate) * up.

Legend: T tokens, I intermediate size, s = sigmoid(gate).

    forward   out = gate * s * up
    backward  dgate = dout * up * s * (1 + gate * (1 - s))           dup = dout * gate * s

All outputs are `=`. `dgate` may be `gate` and `dup` may be `up`: each element is read before it is written.
"""
