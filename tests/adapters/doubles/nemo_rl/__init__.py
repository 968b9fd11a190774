"""A double of NeMo-RL: the modules that the adapter replaces, and nothing else."""

__version__ = "0.6.0"
