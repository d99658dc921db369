"""What a run writes to its folder besides metrics and checkpoints."""
