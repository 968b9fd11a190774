"""Time, memory and exactness of log-prob providers, side by side and against the floor of the machine.

    cases      what is computed, as data            providers  who computes it, from logits
    inputs     logits or hidden states, targets,               and, in linear_providers, from hidden states
               upstream gradients                   measure    time, peak memory, floors, error to float64
    run        one loop over all of it              records    one JSON line per measurement, and the table

``python -m logitless.tools.bench`` needs torch alone; ``logitless bench`` is the same with colours and a progress bar.
"""
