"""Rewards of responses: user functions loaded from files or modules, built-in scorers chosen by data source, the
process pool that runs them, and trained reward models. Imports the data layer and below; does not use Ray, and imports
torch in `models/hf.py` only. Anything above may import it."""
