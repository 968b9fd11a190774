"""``python -m logitless``: the command line."""

from logitless.tools.cli import main

if __name__ == "__main__":
    main()
