"""`python -m octavo`: the same as the `octavo` command."""

import sys

from octavo.frontend.cli import main

if __name__ == "__main__":
    sys.exit(main())
