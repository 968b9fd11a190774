"""Several heads over one batch: the rows of docs/how-to/heads.md point at the tokens that they should."""

from __future__ import annotations

from pathlib import Path

import torch
from pages import compiled


def test_streams_of_multi_token_prediction():
    """Loss and gradients of every stream, against cross-entropy written out token by token in float64."""
    page = {"__name__": "page"}
    for code in compiled(Path(__file__).parents[2] / "docs" / "how-to" / "heads.md")[:2]:
        exec(code, page)
    samples, lengths, streams = page["samples"], page["response_lengths"], page["streams"]
    weight, total = page["head"].weight.detach().double().requires_grad_(), 0.0
    for depth, stream in enumerate(streams):
        log_p, terms = torch.log_softmax(stream.detach().double() @ weight.T, -1), []
        for line, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            for place in range(len(sample) - length, len(sample)):
                if place - 1 - depth >= 0:
                    terms.append(-log_p[line, place - 1 - depth, sample[place]])
        wanted = torch.stack(terms).mean()
        torch.testing.assert_close(page["losses"][depth].double(), wanted, rtol=1e-6, atol=0, check_dtype=False)
        total = total + wanted * (1.0 if depth == 0 else 0.3 / page["DEPTH"])
    total.backward()
    torch.testing.assert_close(page["head"].weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-7)
