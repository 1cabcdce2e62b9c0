"""`python -m gossamer` does what the `gossamer` script does."""

from gossamer.cli import main

main()
