"""Engines that generate, behind one small interface: vLLM, transformers (for debugging) and a fake; the pool that
balances requests over them, and the supervisor that restarts them. Token ids in, token ids out."""
