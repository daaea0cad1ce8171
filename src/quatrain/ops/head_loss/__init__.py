"""Output head and cross-entropy on the supervised rows only, in chunks: the full logits never exist.

Legend: T tokens, R supervised rows, H hidden size, V vocabulary, c rows of a chunk.

    logits_r = hidden[rows[r]] W^T                  loss_r = logsumexp(logits_r) - logits_r[targets[r]]
    dhidden[rows[r]] = (softmax(logits_r) - onehot(targets[r])) W,      zero on every other row

This is the gradient of the SUM of the losses: dividing by the token count of the whole optimizer step happens once,
where the gradient is clipped. The head is frozen, so W gets no gradient. `losses` and `dhidden` are `=`. `rows` are
distinct.
"""
