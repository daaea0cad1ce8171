"""Token embedding: a row gather. The table is frozen, so there is no backward.

out[t] = table[ids[t]]
"""
