"""`python -m memlab`, which is `memlab` where the shell does not find that."""

import sys

from memlab.support.doctor import main

sys.exit(main())
