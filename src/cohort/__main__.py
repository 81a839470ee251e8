"""``python -m cohort`` is the command ``cohort``."""

import sys

from cohort.cli import main

if __name__ == "__main__":
    sys.exit(main())
