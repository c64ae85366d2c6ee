"""`python -m silodp`: the command line, where the command `silodp` is not on the path."""

from silodp.cli.main import main

main()
