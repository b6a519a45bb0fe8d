"""The command that reads a recording of the engine's steps, which timeline/recorder.py makes.

python -m cb_backend.telemetry.recorder FILE [--text] [--chrome OUT] [--png OUT]
"""

from __future__ import annotations

from .timeline.export import main

if __name__ == "__main__":
    raise SystemExit(main())
