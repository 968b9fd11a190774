"""Time, memory and exactness of log-prob providers, side by side and against the floor of the machine.

    cases      what is computed, as data            providers  who computes it
    inputs     logits, targets, upstream gradients  measure    time, peak memory, bandwidth, error to float64
    run        one loop over all of it              records    one JSON line per measurement, and the table

``python -m logitless.bench`` needs torch alone; ``logitless bench`` is the same with colours and a progress bar.
"""
