"""The commands: ``plan``, ``doctor``, ``score``, ``bench``, ``sweep``, ``demo``. Nothing below imports these."""
