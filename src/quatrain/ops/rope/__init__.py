"""Rotary position embedding, split-half pairing (RoFormer, Su et al. 2021, arXiv:2104.09864; pairs (i, i + d/2)).

Legend: T tokens, D head_dim, d rotary_dim <= D. Only the first d dimensions of a head rotate.

    (a, b) = (x[i], x[i + d/2])        forward   (a cos - b sin, b cos + a sin)
                                       backward  (a cos + b sin, b cos - a sin), the transpose

Angles are position * inv_freq in fp32, as every published implementation computes them; cos and sin carry the kind's
attention scaling. x is rotated in place.
"""
