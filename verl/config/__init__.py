"""Every setting of verl, declared once: type, default, unit, one line of documentation and constraints.

`schema` declares the settings, `load` turns a command line, a YAML file or a dict into a frozen `Config`, `legacy` maps
alternative names and answers keys of other launch scripts, `checks` compares settings with each other, `features`
derives which models a run needs, `batch_sizes` derives the sizes of a step, `rollout_engines` and `train_engines` list
what each engine supports. Any package may import this one; it imports neither torch nor ray, so `verl config` is fast.
"""
