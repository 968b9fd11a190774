"""``python -m benchmarks``: the commands that measure and draw."""

from benchmarks.commands import main

if __name__ == "__main__":
    main()
