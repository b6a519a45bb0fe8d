"""The version, in one place: the build reads it from here, and so does `cb_backend.__version__`."""

__version__ = "0.1.0"
