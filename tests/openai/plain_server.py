"""A program that serves the OpenAI routes on uvicorn alone: `python plain_server.py MODEL PORT`; without BentoML.

It ends with the names of the modules that must not have been loaded, on standard output.
"""

from __future__ import annotations

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

import cb_backend

UNWANTED = ("bentoml", "_bentoml_sdk", "_bentoml_impl", "simple_di")

if __name__ == "__main__":
    model, port = sys.argv[1:]
    options = {"num_kv_blocks": 40, "block_size": 16, "swap_space": 0, "num_threads": 1, "max_model_len": 256}
    with cb_backend.Engine(model=model, served_model_name="tiny", dtype="float32", device="cpu", **options) as engine:
        app = Starlette(routes=[Mount("/v1", cb_backend.openai_app(engine))])
        uvicorn.run(app, port=int(port), log_level="warning")
    print(sorted(set(UNWANTED) & {*sys.modules}))
