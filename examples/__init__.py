"""Programs that use the library, in a checkout: each file is one, and ``python -m examples.demo`` another."""
