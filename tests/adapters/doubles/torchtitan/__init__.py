"""A double of torchtitan: the module that the adapter replaces a function of, and nothing else."""

__version__ = "0.3.0"
