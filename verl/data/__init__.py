"""What goes into a run and how it is cut: prompts from files (`files`, `dataset`, `chat`, `measure`), their order
(`order`, `stream`), samples as flat arrays (`batch`), and the cutting of a step's samples over ranks and into
micro-batches (`packing`, `plan`). Everything above this layer may import it; it imports only `errors` and `types`, and
knows nothing of settings, Ray or algorithms."""
