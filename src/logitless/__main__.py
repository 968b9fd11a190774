"""``python -m logitless``: the command line."""

from logitless.cli import main

if __name__ == "__main__":
    main()
