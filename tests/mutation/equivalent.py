"""Mutants that no test can tell from the original, each with the reason."""

_LOSS = "subscribers/ikkuna_subscribers/rules/loss.py"

EQUIVALENT: dict[str, str] = {
    f'{_LOSS}: -1 -> 1 in before = memory.get("step", |-1)': "the first 16 losses have no score, so none of step 0 or 1 is judged",
    f'{_LOSS}: 1 -> 2 in before = memory.get("step", -|1)': "no step is below 0",
    f"{_LOSS}: found[2] > -math.inf -> found[2] >= -math.inf in fresh = [found for found in history.loss_scores "
    "if found[0] > before and |found[2] > -math.inf]": "both leave NaN out, and a score of -inf is that of a healthy step",
}
