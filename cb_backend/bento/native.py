"""The former name of endpoints.py: services that read `/stream` import `texts` from here."""

from .endpoints import texts

__all__ = ["texts"]
