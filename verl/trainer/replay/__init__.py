"""Running a recorded step again in one process, and comparing the trainer with the engine layer by layer. Imports
neither Ray nor vLLM, so that it works on any machine with the model; imported by commands."""
