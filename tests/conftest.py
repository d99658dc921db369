"""What all tests share."""

import os

from hypothesis import settings

# Timings say nothing on a machine that others use too. New examples are for desks: CI says the same twice.
settings.register_profile("shared-machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shared-machine")
