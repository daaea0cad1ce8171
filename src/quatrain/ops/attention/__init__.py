"""Causal grouped-query attention over a packed stream, optionally with a sliding window.

Legend: T tokens of the stream, S tokens of one row, Hq query heads, Hk key/value heads (Hq a multiple of Hk; query
head h reads key head h // (Hq / Hk)), D head_dim. Rows are bounded by cu_seqlens [rows + 1] and never see each other.
A query at position i of its row sees keys j with i - window < j <= i (window None: all j <= i).

    forward   P = softmax(scale * Q K^T + mask)           out = P V                  lse = logsumexp of each score row
    backward  delta = rowsum(dout * out)                  dV = P^T dout              dP = dout V^T
              dS = P * (dP - delta) * scale               dQ = dS K                  dK = dS^T Q

P is recomputed from lse in the backward (FlashAttention, Dao et al. 2022, arXiv:2205.14135, section 3). Scores,
softmax and sums are fp32 (fp64 for fp64 input), whatever the dtype of q, k, v. All outputs are `=`.
"""
