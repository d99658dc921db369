"""Keys of other launch scripts: aliases of settings, and how each unsupported key is handled.

`aliases` maps alternative names to settings, `key_rules` defines and finds the answer to a key, `train_rules` and
`sft_rules` are the tables of answers, `defaults` lists defaults that differ, `launch_script` reads a shell script or a
YAML file, and `migration` turns it into a `verl` command.
"""
