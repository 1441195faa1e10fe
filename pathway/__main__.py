"""`python -m pathway` is the `pathway` command."""

import sys

from pathway.cli import main

sys.exit(main())
