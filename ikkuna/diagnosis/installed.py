"""Finds rules by their names."""

from collections.abc import Iterable

from ikkuna.diagnosis.rule import GROUP, Rule
from ikkuna.errors import ConfigTypeError, PluginError
from ikkuna.logger import log
from ikkuna.plugins import load_plugin, plugin_names

__all__ = ["get_rules"]


def get_rules(rules: "str | Rule | Iterable[str | Rule]" = "default") -> tuple[Rule, ...]:
    """Return rules by their entry-point names.

    Parameters
    ----------
    rules : str, Rule, or iterable of them
        ``"default"`` for every installed rule with `is_default`, ``"all"`` for every installed rule;
        or names of rules and `Rule` objects.  A list can contain ``"default"`` and further rules, which replace those of the same name.

    Raises
    ------
    ConfigTypeError
        If an item is neither a name nor a `Rule`.
    PluginError
        If no rule of this name is installed, or if it cannot be imported.
    ConfigError
        If a rule is invalid.

    Examples
    --------
    >>> get_rules("loss_spike")
    (LossSpikeRule(),)
    """
    items = [rules] if isinstance(rules, str | Rule) else list(rules)
    found: dict[str, Rule] = {}
    for item in items:
        if not isinstance(item, str | Rule):
            raise ConfigTypeError(f"rules needs names and Rule objects, got {type(item).__name__} {item!r}")
        for rule in [item] if isinstance(item, Rule) else _by_name(item):
            found[rule.name] = rule
    return tuple(found.values())


def _by_name(name: str) -> list[Rule]:
    if name not in ("default", "all"):
        return [load_plugin(GROUP, name, Rule)()]
    made = (_load(each) for each in sorted(plugin_names(GROUP)))
    return [rule for rule in made if rule is not None and (rule.is_default or name == "all")]


def _load(name: str) -> Rule | None:
    """Return an installed rule; one that is broken is logged and left out, so that it does not prevent all others."""
    try:
        rule: Rule = load_plugin(GROUP, name, Rule)()
    except PluginError as error:
        log.warning("a rule is left out: %s", error)
        return None
    return rule
