"""`python -m quatrain` is `quatrain`."""

import sys

from quatrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
