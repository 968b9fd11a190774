"""The groups of this rank: ``tp`` and ``cp``, each with rank, size and group."""

_state = None


def set_parallel_state(state):
    global _state
    _state = state


def get_parallel_state():
    return _state
