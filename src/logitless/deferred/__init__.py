"""Models whose logits are not computed, and torch's own functions that read such logits.

model     ``defer``: a head that returns ``Logits``            column_parallel   the same for Megatron's head
read      numbers of each row of ``Logits``, from readings   served            torch's functions by name
lazy      tensors that are computed only if they are read    distribution      softmax and log_softmax of ``Logits``
pending   numbers of parts, which are read together          losses            cross_entropy and nll_loss
bound     a forward of one module alone                divergence        what distillation writes of two models
"""

from logitless.deferred.model import Deferral, defer, is_without_logits, undefer

__all__ = ["Deferral", "defer", "is_without_logits", "undefer"]
