"""The demo: a tiny model, its tokenizer and addition problems, created and trained offline. It uses the trainer as any
user would; only `commands` imports it."""
