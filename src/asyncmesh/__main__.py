"""`python -m asyncmesh` is `asyncmesh`."""

from asyncmesh.cli.main import main

main()
