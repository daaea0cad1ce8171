"""The next token of every row from its logits, where the host does not look.

Legend: B rows, S tokens that a row may grow to, V vocabulary.

    temperature 0    the likeliest token, the first of equals
    otherwise        order   = tokens by falling logit, equals by rising id
                     kept    = the first top_k of order (0: all), and of these, with p = softmax(logits / temperature)
                               over them, the ones before which p sums to less than top_p
                     token   = the first by id at which the sum of p over kept exceeds draw * the sum over all of kept

`draw` is a number in [0, 1) of the row's own: what a row becomes does not depend on its neighbours. `tokens` is `=`.
"""
