"""How often the rows are gone through, and what is kept between: a pass reads logits, or makes their gradient.

look         the first pass: every reading             back          the second: dZ, and the products that it goes into
scoring      both as one autograd Function             one_pass      a loss: both while a chunk of rows is there
frozen       unit gradients, for a frozen head         exponentials  stored for the second pass
chunk        rows whose logits exist at a time         terms         from results and upstream gradients to dZ
own_terms    whether a caller's term goes in chunks
"""
