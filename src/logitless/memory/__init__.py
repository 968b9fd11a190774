"""What a call needs, before anything runs.

ledger     which storages are alive at the fullest moment     step    a call and its backward, given by sizes
estimate   ``estimate``: the step on the meta device
"""

from logitless.memory.estimate import Estimate, estimate
from logitless.memory.ledger import Item

__all__ = ["Estimate", "Item", "estimate"]
