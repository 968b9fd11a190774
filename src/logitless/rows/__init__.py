"""Which rows of the logits matter, and where each result belongs.

samples    a batch of samples, checked and joined          layouts   which tokens each context-parallel rank has
rows       ``Rows``: the rows to score, and the way back   exchange  per-row results between ranks
"""

from logitless.rows.layouts import Contiguous, Zigzag
from logitless.rows.rows import Rows

__all__ = ["Contiguous", "Rows", "Zigzag"]
