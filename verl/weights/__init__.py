"""Weight sync from the trainer to the engines: buckets of bytes, transports that send them, and a probe that verifies
every engine. Knows no engines. Imported by training, rollout and everything above."""
