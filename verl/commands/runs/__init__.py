"""The subcommands that work on the folder of a run."""
