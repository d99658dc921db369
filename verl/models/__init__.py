"""Hugging Face models as files: config.json, headers of weights, supported families, safety checks, shapes.

Nothing here imports torch, so that settings and commands can check a model before anything is loaded. Every package
above the basics may import this one.
"""
