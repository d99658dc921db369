"""The subcommands of `verl`, one module each: `HELP` is the help text, `main(argv)` runs the command and returns the
exit code. Modules import torch and Ray only while they run. `cli` imports them by name."""
