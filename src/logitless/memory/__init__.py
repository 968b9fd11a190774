"""What a call needs, before anything runs.

shapes     operators on the meta device
ledger     which storages are alive at the fullest moment, and what for
step       a call and its backward, given by sizes
estimate   ``estimate``: the step on the meta device, written down
"""

from logitless.memory.estimate import Estimate, estimate
from logitless.memory.ledger import Item

__all__ = ["Estimate", "Item", "estimate"]
