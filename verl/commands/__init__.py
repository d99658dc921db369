"""The subcommands of `verl`, one module each: `HELP` is the help text, `main(argv)` runs the command and returns the
exit code. Modules import torch and Ray only while they run. Only `cli` imports this package, by module name."""

SETTINGS_HELP = """\
settings:
  key=value               set a setting; `verl config` lists all settings, `verl config KEY` explains one
  +key=value              add an entry to an open dictionary (engine_kwargs, ray_init, ...)
  ~key                    reset a setting to its default
  --config-path DIR       directory of your YAML files
  --config-name NAME      YAML file to load from it; `defaults:` lists and ${...} work as in Hydra
  -m, --multirun          run once per value of key=a,b
"""
