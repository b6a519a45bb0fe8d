"""The packages that the engine is written against, checked where an environment did not come from pip's resolver.

A Bento and a checkout hold sources, which run with whatever is installed. An older torch or transformers would fail
later, inside, with an error about something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# The lowest versions that pyproject.toml admits.
NEEDED: Mapping[str, tuple[int, int]] = {"torch": (2, 8), "transformers": (5, 0)}


class VersionError(ImportError):
    """A package is absent or too old. The message is one line: which, and what to do."""


def check_versions(needed: Mapping[str, tuple[int, int]] = NEEDED) -> None:
    """Reads the installed versions; imports nothing.

    Raises:
        VersionError: one of `needed` is absent or older.
    """
    for package, least in needed.items():
        wanted = f"{package}>={'.'.join(map(str, least))}"
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise VersionError(f"{package} is not installed: pip install '{wanted}'") from None
        release = re.match(r"(\d+)\.(\d+)", installed)
        if release is not None and (int(release[1]), int(release[2])) < least:
            raise VersionError(f"{package} {installed} is installed and too old: pip install '{wanted}'")
