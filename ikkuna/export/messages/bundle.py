"""The old place of the bundle, until every import has been changed."""

from ikkuna.export.message.bundle import MessageBundle

__all__ = ["MessageBundle"]
