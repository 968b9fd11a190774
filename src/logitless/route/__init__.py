"""Which route a call takes: ``plan`` for log-probs, ``loss`` for losses, sizes in ``tiles``, times in ``costs``.

What ranks send each other on the way is in ``sent``.
"""

from logitless.route.loss import first_pass, loss_plan
from logitless.route.plan import Collective, Plan, in_words, score_plan
from logitless.route.sent import over_samples, over_vocabulary

__all__ = [
    "Collective",
    "Plan",
    "first_pass",
    "in_words",
    "loss_plan",
    "over_samples",
    "over_vocabulary",
    "score_plan",
]
