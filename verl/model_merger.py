"""Entry point: `python -m verl.model_merger` runs `verl merge`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "merge")
    runpy.run_module("verl", run_name="__main__")
