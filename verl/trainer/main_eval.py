"""Entry point: `python -m verl.trainer.main_eval` runs `verl eval`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "eval")
    runpy.run_module("verl", run_name="__main__")
