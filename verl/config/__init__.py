"""Every setting of verl, declared once: type, default, unit, one line of documentation and what it must satisfy.

`schema` holds the declarations, `load` turns a command line, a YAML file or a dict into a frozen `Config`, `aliases`
knows second spellings, `checks` compares settings with each other, `mutes` knows which of them have no effect, `needs`
says which models an algorithm takes, `sizes` derives the batch sizes, `reference` writes the settings page. Everything
above may import it; it imports no torch and no ray, so that `verl config` is quick.
"""
