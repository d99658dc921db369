"""Built-in reward functions, chosen by a row's data source."""
