"""`python -m longspan` is `longspan`."""

import sys

from longspan.cli import main

sys.exit(main())
