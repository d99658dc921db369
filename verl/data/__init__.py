"""The data of a run: prompts from files (`files`, `dataset`, `chat`, `lengths`), the order in which they are drawn
(`samplers`), samples as flat arrays (`flat_batch`), and the split of a step over ranks and micro-batches
(`packing`, `plan`). Any layer above may import it; its only settings are batch sizes, and it knows nothing of Ray or
algorithms."""
