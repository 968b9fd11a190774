"""Models whose logits are not computed, and torch's own functions that read such logits.

read      numbers of each row of ``Logits``, from readings               served         torch's functions by name
lazy      tensors that are computed only if somebody reads them          distribution   softmax and log_softmax of ``Logits``
pending   numbers of parts of the logits, which are read together        losses         cross_entropy and nll_loss
model     ``defer``: a head that returns ``Logits``
"""

from logitless.deferred.model import Deferral, defer, undefer

__all__ = ["Deferral", "defer", "undefer"]
