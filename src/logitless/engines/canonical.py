"""Log-probs and logits of a rollout engine, with the bits that a trainer gets from hidden states.

    normaliser(logits)             (reference, log_sum) of each row; a log-prob is (z - reference) - log_sum
    token_logprobs(logits, ids)    [R, K] log-probs of listed ids
    all_logprobs(logits)           [R, V] log-probs, for samplers that read all of them
    product(hidden, weight)        [R, V] logits of a head, rounded once

The first is ``bits="canonical"`` of the library itself; the next two take a difference of it. Bits are equal where
logits are, and the last has those that ``Logits(bits="canonical")`` has within.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.backends import backend_of, run_solved, run_statistics
from logitless.backends.contract import Problem
from logitless.call import MEMORY
from logitless.engines import VARIABLE
from logitless.errors import LogitlessError
from logitless.errors.arguments import refused
from logitless.machine import Machine
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.softmax import Normaliser
from logitless.sources.gemm import multiply_fixed
from logitless.spec import Head, parse_memory


def normaliser(logits: Tensor, temperature: Tensor | float = 1.0) -> Normaliser:
    """``[R]`` pieces of log Z of logits ``[R, V]`` over the temperature, which may be one number for each row."""
    x = _rows(logits)
    head, rows = Head(temperature=temperature), len(x)
    name, _ = backend_of(x, "auto", None)
    gain = head.gain(rows, torch.float32, x.device, single=True)
    # No target is asked for: column 0 stands in for one.
    column = torch.zeros(rows, dtype=torch.int64, device=x.device)
    memory = parse_memory(MEMORY["logits"])
    problem = Problem(x, None, column, gain, 0.0, x.shape[1], False, memory, found=True, canonical=True)
    m, s, *_ = run_solved(name, run_statistics(name, problem)[None], gain)
    return Normaliser(m, s.log())


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """``[R, K]`` float32 log-probs of ``ids``, of logits that exist or that are not computed."""
    ids = ids.to(torch.int64)
    if isinstance(logits, Logits):
        found = logprobs(logits, ids[:, 0], ids=ids).ids_logprobs
        assert found is not None
        return found
    return _less(logits.gather(1, ids).float(), normaliser(logits))


def all_logprobs(logits: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """``[R, V]`` float32 log-probs of logits over the temperature."""
    norm = normaliser(logits, temperature)
    unit = not isinstance(temperature, Tensor) and temperature == 1.0
    gain = Head(temperature=temperature).gain(len(logits), torch.float32, logits.device, single=True)
    z = logits.to(torch.float32, copy=True)
    return _less(z if unit else z.mul_(gain[:, None]), norm)


def _less(z: Tensor, norm: Normaliser) -> Tensor:
    """``(z - reference) - log_sum``, over z, in the library's order."""
    return z.sub_(norm.reference[:, None]).sub_(norm.log_sum[:, None])


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``hidden @ weight.T + bias`` into ``out`` ``[R, V]``, summed in float32 and rounded once. Hidden states and
    weight have one dtype, of 16 bits or float32."""
    if weight.dtype != hidden.dtype:
        raise LogitlessError(
            f"head: the weight is {weight.dtype} and hidden states are {hidden.dtype}, and a product has one dtype. "
            f"Keep the head in the model's dtype, or leave head out of {VARIABLE}."
        )
    wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    # Float32 operands are added up by a library that may cut the width of a few rows.
    small = hidden.dtype.itemsize == 2
    multiply_fixed(hidden, weight, wide, wide=Machine.of(hidden.device).wide_products, small=small)
    if bias is not None:
        wide.add_(bias)
    return out if wide is out else out.copy_(wide)


def _rows(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise refused("logits", "a matrix of logits", logits)
    return logits if logits.shape[1] < 2 or logits.stride(1) == 1 else logits.contiguous()
