"""``logitless score``: per-token log-probs and entropy of a file of prompts and responses under a model.

    file of records  ->  parts of a fixed number of records, striped over ranks
    part             ->  micro-batches under a token budget  ->  one file per part, committed by a rename
    all parts        ->  the output, in input order, by one more rename

A part depends on its records and the settings alone, so neither the number of ranks nor a kill changes a byte.
"""

from logitless.tools.score.run import Job, Progress, Summary, score_file

__all__ = ["Job", "Progress", "Summary", "score_file"]
