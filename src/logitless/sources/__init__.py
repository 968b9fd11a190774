"""Sources: where the logits of a call come from.

given      logits that exist: rows of a matrix                 linear    a head: tiles of its product, and back
listed     single logits of a row, by dot products or lookup   teachers  the teacher's logits beside the student's
"""
