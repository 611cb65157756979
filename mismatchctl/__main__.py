"""`python -m mismatchctl`."""

from mismatchctl.cli.main import main

main()
