"""`python -m memlab`, which is `memlab` where the shell does not find that."""

from __future__ import annotations

import sys

from memlab.errors import MissingExtraError
from memlab.extras import needing_torch


def main() -> int:
    """Run the command line, or say in one line that torch is missing."""
    try:
        with needing_torch("memlab doctor"):
            from memlab.support import doctor
    except MissingExtraError as missing:
        sys.exit(str(missing))
    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
