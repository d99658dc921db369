"""The commands about trained models: `verl generate`, `verl eval` and `verl merge`."""
