"""Serving the metrics of a run to Prometheus: their names there, and the server."""
