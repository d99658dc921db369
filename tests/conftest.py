"""What all tests share."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)  # timings say nothing on a machine that others use too
settings.load_profile("shared-machine")
