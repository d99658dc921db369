"""Keys of other launch scripts: aliases of settings, and how each unsupported key is handled.

`train_keys.toml` and `sft_keys.toml` are the tables, `legacy_keys` reads them and looks keys up, `key_rules` defines
the answer to an unsupported key.
"""
