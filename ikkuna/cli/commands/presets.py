"""``ikkuna presets``: lists the installed presets."""

from ikkuna.cli.plugin_table import list_command

__all__ = ["command"]

command = list_command("preset", "presets")
