"""Engines that generate, behind one small interface: vLLM and transformers (for debugging), in this process or in
another Python environment (`isolated`); the pool that balances requests over engines, and the supervisor that restarts
them. Token ids in, token ids out. `verl.config.rollout_engines` registers engines by name."""
