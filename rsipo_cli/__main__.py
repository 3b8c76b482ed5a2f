"""`python -m rsipo_cli`."""

from rsipo_cli.app import main

main()
