"""`python -m tests.fuzz`. The processes import what they run, and nothing can be imported from here."""

import sys

from tests.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
