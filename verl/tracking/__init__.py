"""What a run tells: metrics and timers, the console's one line per step, the sinks that keep metrics, and advice when
the numbers show a known trouble. Plain Python and rich, no torch; anything above may import it."""
