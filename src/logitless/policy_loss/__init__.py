"""The loss of a policy update from hidden states and the head's weight, gradients included."""

from logitless.policy_loss.carried import Loss, LossResult
from logitless.policy_loss.loss import MEMORY, linear_policy_loss

__all__ = ["MEMORY", "Loss", "LossResult", "linear_policy_loss"]
