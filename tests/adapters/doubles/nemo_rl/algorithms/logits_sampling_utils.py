"""Sampling parameters, and the filter that goes with them."""

from dataclasses import dataclass

import torch


@dataclass
class TrainingSamplingParams:
    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def need_top_k_or_top_p_filtering(sampling_params):
    if sampling_params is None:
        return False
    return (sampling_params.top_k or -1) > 0 or sampling_params.top_p != 1.0


def apply_top_k_top_p(logits, top_k, top_p, chunk_size=256):
    """Logits with -inf at filtered places, and the mask of the others; None if nothing is filtered."""
    keep = None
    if (top_k or -1) > 0:
        keep = logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    if top_p != 1.0:
        open_logits = logits if keep is None else logits.masked_fill(~keep, -torch.inf)
        ordered, place = open_logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        # A token stays if those likelier than it do not fill the nucleus yet; the likeliest always does.
        inside = p.cumsum(-1) - p < top_p
        nucleus = torch.zeros_like(inside).scatter(-1, place, inside)
        keep = nucleus if keep is None else keep & nucleus
    return (logits, None) if keep is None else (logits.masked_fill(~keep, -torch.inf), keep)
