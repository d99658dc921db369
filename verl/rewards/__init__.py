"""How answers are scored: the user's own function, loaded from a file or a module, or a shipped scorer chosen by the
data source; in a pool of processes that may hang and die; and trained reward models. Imports the data layer and below;
knows no Ray, and torch in `model_hf.py` alone. Anything above may import it."""
