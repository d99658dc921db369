"""From settings to the workers and objects of an RL run: `rl_builder` has the stages in order, `placement` puts engines
on devices, `episode_client` sends requests to the episode workers. Imported by the launcher, demo and commands."""
