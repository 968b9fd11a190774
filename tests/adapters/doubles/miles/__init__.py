"""A double of miles: the modules that the adapter replaces, and nothing else."""

__version__ = "0.1.0"
