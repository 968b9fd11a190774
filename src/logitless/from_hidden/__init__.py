"""Log-probs from hidden states and the head's weight, without ever having logits. In the order of the flow:

plan           which route, in which tiles                projection   selected rows and tiles of their logits
gemm           products that keep their accumulator       exponentials 16-bit exponentials stored for backward
statistics     forward, tile by tile                      gradients    backward, tile by tile
frozen_head    both at once, where the head is frozen     logprobs     ``linear_logprobs`` and its seam to autograd
policy_head    ``PolicyHead``, the module
"""

from logitless.from_hidden.logprobs import linear_logprobs
from logitless.from_hidden.policy_head import PolicyHead

__all__ = ["PolicyHead", "linear_logprobs"]
