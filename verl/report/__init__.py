"""The HTML report of a run: one file, without a server or network. Reads the run's folder through `tracking`; only
commands import it. The page itself is plain HTML, CSS and JavaScript in `page/`."""
