"""Runs pickled plans on an executor of its own and prints the tokens as JSON: a program, for a process of its own.

python -m tests.execution.replay_plans PLANS CONFIG
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from cb_backend import EngineConfig
from cb_backend.execution.startup import prepare
from cb_backend.models.loader import load_model


def main(plans: str, config: str) -> None:
    settings = EngineConfig(**json.loads(config))
    executor = prepare(settings, load_model(settings)).executor
    tokens = []
    for plan in pickle.loads(Path(plans).read_bytes()):
        result = executor.launch(plan).result()
        tokens.append([list(row) for row in result.token_ids])
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
