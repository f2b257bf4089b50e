"""``ikkuna backends``: lists the installed backends."""

from ikkuna.cli.plugin_table import list_command

__all__ = ["command"]

command = list_command("backend", "backends")
