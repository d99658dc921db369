"""Entry point: `python -m verl.trainer.main_generation_server` runs `verl generate`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "generate")
    runpy.run_module("verl", run_name="__main__")
