"""Training with Megatron-Core: tensor, pipeline and expert parallel ranks. Only this package imports `megatron`."""
