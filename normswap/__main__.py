"""``python -m normswap``: the command line."""

from normswap.cli import main

main(prog_name="normswap")
