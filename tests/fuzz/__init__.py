"""The standing guard of the numbers: random calls of every path, compared with float64. See ``docs/reliability.md``."""
