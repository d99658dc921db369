"""SGLang as a rollout engine. The only package that imports sglang."""
