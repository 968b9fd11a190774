"""Which route a call takes: ``plan`` for log-probs, ``loss`` for losses, sizes in ``tiles``, times in ``costs``."""

from logitless.route.loss import first_pass, loss_plan
from logitless.route.plan import Plan, score_plan

__all__ = ["Plan", "first_pass", "loss_plan", "score_plan"]
