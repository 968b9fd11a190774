"""A double of prime-rl: the modules that the adapter replaces, and nothing else."""

__version__ = "0.8.0"
