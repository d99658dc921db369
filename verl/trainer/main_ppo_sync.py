"""Entry point: `python -m verl.trainer.main_ppo_sync` runs `verl train`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    runpy.run_module("verl", run_name="__main__")
