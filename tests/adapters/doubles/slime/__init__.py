"""A double of slime: the modules that the adapter replaces, and nothing else."""

__version__ = "0.3.1"
