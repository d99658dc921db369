"""Migration of launch scripts: what `verl migrate` does.

`capture` runs a script in the sandbox with stand-ins for the programs that the script starts (`recorder` runs inside),
`launches` finds the runs among the recorded arguments and reads YAML files, and `command` turns a run into a `verl`
command. Only `verl.commands` imports this package; answers to keys are in `verl.config.legacy`.
"""
