"""`python -m inferq` is `inferq`."""

import sys

from inferq.cli import main

if __name__ == "__main__":
    sys.exit(main())
