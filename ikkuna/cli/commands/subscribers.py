"""``ikkuna subscribers``: lists the installed subscribers."""

from ikkuna.cli.plugin_table import list_command

__all__ = ["command"]

command = list_command("subscriber", "subscribers")
