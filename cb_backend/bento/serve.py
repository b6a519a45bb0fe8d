"""`python -m cb_backend.bento.serve SERVICE [OPTIONS]`: `bentoml serve SERVICE [OPTIONS]`, with one line for an error.

BentoML makes its home and looks up a Bento's models before it imports a service, so a home that cannot be written ends
in its traceback, and a model that is missing without advice. Here both are checked first. Everything else is checked
when the service is deployed (preflight.py), by whichever command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .preflight import Unfit, check_home, check_models, home_of


def main(arguments: Sequence[str]) -> int:
    """Becomes `bentoml serve`; returns only where that would fail."""
    home = home_of()
    target = next((argument for argument in arguments if not argument.startswith("-")), ".")
    try:
        check_home(home)
        check_models(target, home)
    except Unfit as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", "serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
