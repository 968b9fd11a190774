"""The head of models with a softcap."""

import torch

from prime_rl.trainer.models.layers.lm_head import score


class GemmaFusedOutputLinear(torch.nn.Linear):
    def __init__(self, in_features, out_features, chunk_size, softcap):
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.softcap = softcap

    def forward(self, hidden_states, labels=None, temperature=None):
        assert labels is not None, "labels are required"
        assert temperature is not None, "temperatures are required"
        logprobs, entropy = score(hidden_states, self.weight, labels, temperature, self.softcap)
        return {"logprobs": logprobs, "entropy": entropy}
