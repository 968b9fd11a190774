"""What a call needs, before anything runs.

shapes     operators on the meta device                meta      arguments without numbers
ledger     which storages are alive, and what for      sizes     logits and rows given by sizes alone
estimate   ``explain`` and ``estimate``: a verb called dry
"""

from logitless.memory.estimate import Estimate, estimate, explain
from logitless.memory.ledger import Item
from logitless.memory.sizes import sized, sized_rows

__all__ = ["Estimate", "Item", "estimate", "explain", "sized", "sized_rows"]
