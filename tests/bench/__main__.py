"""`make bench`: the engine's table."""

import sys

from tests.bench.engine import main

sys.exit(main())
