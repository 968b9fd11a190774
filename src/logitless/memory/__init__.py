"""The route and the memory of a call, before anything runs.

shapes     operators on the meta device                meta      arguments without numbers, or given by sizes alone
ledger     which storages are alive, and what for      estimate  ``explain`` and ``estimate``: a verb called dry
"""

from logitless.memory.estimate import Estimate, estimate, explain
from logitless.memory.ledger import Item
from logitless.memory.meta import sized, sized_rows

__all__ = ["Estimate", "Item", "estimate", "explain", "sized", "sized_rows"]
