"""The first five minutes: a tiny model, its tokenizer and its arithmetic, made here and trained here, offline. Stands
on the trainer as any user would; only the command line imports it."""
