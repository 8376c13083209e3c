"""``python -m modpass``: the command line."""

import sys

from modpass.cli import main

if __name__ == "__main__":
    sys.exit(main())
