"""`python -m sinkscope` is the `sinkscope` command."""

from sinkscope.cli import main

if __name__ == "__main__":
    main()
