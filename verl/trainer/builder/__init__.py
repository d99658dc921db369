"""From settings to the workers and objects of an RL run: `rl_builder` has the stages in order, `placement` puts engines
on devices. Imported by the launcher, demo and commands."""
