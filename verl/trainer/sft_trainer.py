"""Entry point: `python -m verl.trainer.sft_trainer` runs `verl sft`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "sft")
    runpy.run_module("verl", run_name="__main__")
