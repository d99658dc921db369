"""Entry point: `python -m verl.experimental.one_step_off_policy.main_ppo` runs `verl train` one step off policy."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "--config-name", "one_step_off_ppo_trainer"]
    runpy.run_module("verl", run_name="__main__")
