"""`python -m gossamer.cli` does what the `gossamer` script does."""

from gossamer.cli import main

main()
