"""Settings of other launch scripts that are no settings here, each with an answer.

`rules` says what an answer is and finds it, `train_rules` and `sft_rules` are the tables, `defaults` lists defaults
that differ, `launch_script` reads a shell script or a YAML file, and `migration` turns it into a `verl` command. Keys
that only have another name are in `verl.config.aliases`.
"""
