"""Engines that generate, behind one small interface: vLLM, transformers (for debugging) and a fake; and the pool that
spreads requests over them. Token ids in, token ids out. Imported by workers, agents, trainer and cli."""
