"""A head that returns log-probs and entropies; entropy cannot be differentiated, and half precision rounds logits."""

import torch


def score(hidden, weight, labels, temperature, softcap=None):
    """Log-probs and entropies of ``[b, s]`` labels, in float32; the logits are in the dtype of the operands."""
    labels, temperature = (x.reshape(hidden.shape[:-1]) for x in (labels, temperature))
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scaled = logits * (1.0 / temperature)[..., None]
    log_p = scaled.log_softmax(-1)
    known = (labels >= 0) & (labels < weight.shape[0])
    picked = log_p.gather(-1, torch.where(known, labels, 0)[..., None])[..., 0]
    # An id outside the vocabulary counts as a logit of 0.
    picked = torch.where(known, picked, -torch.logsumexp(scaled, -1))
    return picked, _NoGradient.apply(-(log_p.exp() * log_p).sum(-1))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert gradient is None, "entropy has no gradient"


class FusedOutputLinear(torch.nn.Linear):
    def __init__(self, in_features, out_features, chunk_size):
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    def forward(self, hidden_states, labels=None, temperature=None):
        assert labels is not None, "labels are required"
        assert temperature is not None, "temperatures are required"
        logprobs, entropy = score(hidden_states, self.weight, labels, temperature)
        return {"logprobs": logprobs, "entropy": entropy}


class VanillaOutputLinear(torch.nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, hidden_states, labels=None, temperature=None):
        return {"logits": super().forward(hidden_states)}
