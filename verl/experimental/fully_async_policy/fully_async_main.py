"""Entry point: `python -m verl.experimental.fully_async_policy.fully_async_main` runs `verl train` asynchronously."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "--config-name", "fully_async_ppo_trainer"]
    runpy.run_module("verl", run_name="__main__")
