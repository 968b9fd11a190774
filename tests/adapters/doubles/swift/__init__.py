"""A double of ms-swift: the module that the adapter replaces a function of, and nothing else."""

__version__ = "4.6.0"
