"""Readings of a row: a file for each.

reading    the protocol of a reading                     found      from lines to results
best       the most likely tokens                        moments    sums over a row
rank       columns before the target                     ids        log-probs of listed ids, and of all others
support    the ids that a sampler kept                   outcomes   divergence over a teacher's K log-probs
table      all readings of a call beyond the softmax
"""
