"""Time, memory and exactness of log-prob providers, side by side and against the floor of the machine.

    cases      problems, as data                    providers  who solves them, from logits
    inputs     logits or hidden states, targets,               and, in linear_providers, from hidden states
               upstream gradients                   measure    time, peak memory, floors, error to float64
    run        the loop over cases and providers    records    one JSON line per measurement, and the table

``python -m benchmarks.bench`` needs torch alone; ``python -m benchmarks bench`` adds colours and a progress bar.
"""
