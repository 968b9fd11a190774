"""The commands: ``plan``, ``score``, ``doctor``, ``bench``, ``sweep``, ``plot``, ``demo``. The library imports none."""
