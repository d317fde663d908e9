"""`python -m opnorm`, the same as the command `opnorm`."""

import sys

from opnorm.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
