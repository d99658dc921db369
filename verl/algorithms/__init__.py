"""Advantages, losses, KL and aggregation: pure functions of tensors, each as close to its formula as possible.

They import nothing but torch; training and everything above may import them. All arrays are flat: per-token values are
`[T]`, sequences are concatenated with boundaries `offsets [B+1]`, and `mask [T]` marks the generated tokens.
"""
