"""RMSNorm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467), with the residual gradient added in
passing.

Legend: R rows, D features.

    forward   rstd = 1 / sqrt(mean(x^2) + eps)                       out = x * rstd * weight
    backward  g = dout * weight                         dx = residual + rstd * (g - x * rstd^2 * mean(g * x))
              dweight += sum over rows of dout * x * rstd

`out`, `rstd` and `dx` are `=`; `dweight` is `+=`. Statistics and products are fp32 (fp64 for fp64 input).
"""
