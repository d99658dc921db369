"""Supervised fine-tuning: from data files to examples (`examples`, `data`), the model on each rank (`model`,
`worker`), the step (`trainer`), and `builder`, which builds them from settings. Imported by demo and commands."""
