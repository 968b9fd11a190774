"""``logitless plan``: the memory that the loss step of a model will need, in every way to write it, and the best one.

    ways        a micro-batch by its sizes; the ways to write its step, what each needs, the largest micro-batch of each
    recommend   the call to write, its ``memory=``, and its code
    show        the answer as text and JSON

A loss step starts where the model ends, with hidden states ``[T, D]`` and the head's weight ``[V, D]``, and ends with
their gradients. Ways that build logits have three parts: the head, the call on its logits, the head's backward.

    peak of a step = most bytes alive at once beyond hidden states, weight and what the model itself holds
"""

from logitless.tools.plan.recommend import ModelPlan, plan_model
from logitless.tools.plan.ways import WAYS, LossStep

__all__ = ["WAYS", "LossStep", "ModelPlan", "plan_model"]
