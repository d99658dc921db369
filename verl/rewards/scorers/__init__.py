"""Built-in reward functions, selected by the data source of a row."""
