"""Optimizers: AdamW with low-precision state, and Muon."""
