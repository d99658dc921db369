"""Entry points of launch scripts for asynchronous training, by the names under which they start it."""
