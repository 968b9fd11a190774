"""The commands: ``plan``, ``score``, ``doctor``, ``tune``. The library imports none."""
