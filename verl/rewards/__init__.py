"""How answers are scored: the user's own function, loaded from a file or a module, or a shipped scorer chosen by the
data source; in a pool of processes that may hang and die. Imports the data layer and below; knows no engine, no Ray and
no torch. Anything above may import it."""
