"""Engines that generate, behind one small interface: vLLM and transformers (for debugging); the pool that
balances requests over them, and the supervisor that restarts them. Token ids in, token ids out."""
