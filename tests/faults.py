"""Everything that can go wrong, and what ikkuna does about it; tests bear the numbers as ``@pytest.mark.fault(12)``.

The site's page on faults is made of this and of the tests that are so marked; a test checks that none is missing.
Where a number is not here, the catalogue speaks of another part of ikkuna.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """What goes wrong, and what happens then; `aside` says what was considered and decided in another way."""

    what: str
    then: str
    aside: str = ""


LEFT_OUT = {
    37: "Time is measured for each subscriber, and told by ``health().seconds``; who is slow is not slowed down further by a rule.",
    38: "A metric that never returns cannot be stopped in Python, and a thread that watches the first is one more that can fail.",
}
"""Faults that are left to the user, and why."""

ARGUMENTS = {
    1: Fault(
        "what is added is no module", "``ConfigTypeError`` names the type that was given; no hook is put anywhere"
    ),
    2: Fault("a pair that is not a name and a module", "``ConfigTypeError`` names the types of its parts"),
    3: Fault("a kind with a typing error", "``UnknownKindError`` suggests the nearest kind, and lists all"),
    4: Fault(
        "a backend that does not exist or cannot be imported", "the subscriber is refused, and the bus is as it was"
    ),
    5: Fault("``subsample`` that is no whole number from 1 on", "``ConfigError`` says what was given"),
    6: Fault("a test accuracy that is measured every 0 steps", "``ConfigError`` says what was given"),
    7: Fault("``depth`` below -1 or no whole number", "``ConfigError`` says what is possible"),
    8: Fault("a module filter that fits nothing", "``ConfigError`` lists the types of modules there are"),
    9: Fault("a module that is added twice", "it is looked at once, and the log says so"),
    10: Fault("two exporters on one model", "each gets every message once; closing one leaves the other as it is"),
    11: Fault(
        "no kind, a kind twice, or something that is no name", "``ConfigError``; a single name stands for a list of one"
    ),
    12: Fault("a ratio of one, of three, or of the same kind twice", "``ConfigError`` names the kinds that were given"),
    13: Fault("an unknown backend", "``ConfigError`` lists those that are installed"),
    14: Fault(
        "a log directory that is empty, a number, bytes, or has a NUL in it",
        "``ConfigError``; without one it is ``run``",
    ),
    15: Fault(
        "a test set that is empty or has no labels", "``ConfigError`` when the metric is made, not while training runs"
    ),
    16: Fault("a scripted module", "``ConfigError``: it takes no hooks; add it before scripting"),
    17: Fault(
        "a model that was compiled and called before it is watched",
        "it is compiled once more, and seen from then on; the log says so",
        "nothing has to be asked for: a second compilation costs seconds, a run without data costs the run",
    ),
    18: Fault("lazy modules", "they are seen as soon as they have parameters, in their first step"),
    19: Fault("an exporter that is used after ``close()``", "``ClosedError``; a second ``close()`` does nothing"),
    20: Fault(
        "a second model, or none at all", "``ConfigError`` names the class of the first, ``ConfigTypeError`` the type"
    ),
}

PLUGINS = {
    21: Fault(
        "a plugin that fails while it is imported",
        "``PluginError`` with its distribution and the cause, when it is asked for; the others work",
    ),
    22: Fault("a plugin that ends the process while it is imported", "``PluginError`` says so; the process goes on"),
    23: Fault("Ctrl-C while a plugin is imported", "it is let through"),
    24: Fault("an entry point that leads to no subscriber", "``PluginError`` says what is there in its place"),
    25: Fault(
        "two distributions that offer one name",
        "``PluginError`` names both, also if one is ikkuna itself",
        "the built-in metric does not win: a name that means two things is worth knowing of",
    ),
    26: Fault(
        "a plugin whose name is no identifier, or a private one",
        "it is ignored, and the log says so",
        "listing plugins must not fail, so this is no error",
    ),
    27: Fault(
        "metadata of another package that cannot be read",
        "it is passed over, the log names it, and all other plugins work",
    ),
    28: Fault("a subscriber whose constructor fails", "its own error arrives, and the bus is as it was"),
    29: Fault(
        "a metric that always fails",
        "it is logged the 1st and the 10th time, then disabled; training gives the same bits, others go on",
    ),
    30: Fault("a metric that fails now and then", "it is counted and logged; a success in between pardons"),
    31: Fault("Ctrl-C and ``sys.exit`` in a metric", "they are let through; every other error is kept from training"),
    32: Fault("a metric that runs out of memory on the device", "it is disabled at once"),
    33: Fault(
        "metrics that go in a circle",
        "``ConfigError`` shows the circle, when the last one is registered",
        "there is no limit of depth while training runs: what is no circle ends",
    ),
    34: Fault(
        "a result that was not announced", "it counts as the metric's failure, and the message says what it may emit"
    ),
    35: Fault(
        "who registers, leaves or closes while messages are delivered", "it holds from the next message or step on"
    ),
    36: Fault("the order of subscribers", "is that of registration, in every process"),
    39: Fault("a metric that calls the model", "nobody looks at that call; ``evaluate`` is the way to have it seen"),
    40: Fault(
        "a metric that writes to the tensor it was lent",
        "it is disabled, and the log says what it changed; writes through ``.data`` are found by ``check_subscriber``, in a test",
        "there is no slow mode with copies of all tensors",
    ),
    41: Fault(
        "a metric that keeps the tensors it was lent", "they hold no graph; numbers that were emitted are floats"
    ),
    42: Fault(
        "a tensor that is overwritten after it was seen",
        "what a metric returned is copied at once, even if it is a view",
    ),
    43: Fault("an object whose ``repr`` or ``str`` fails", "errors are told with the name of its class"),
    44: Fault("a handler of the log that fails", "nothing reaches training"),
    45: Fault("a metric that returns something", "it changes nothing: hooks return nothing"),
    46: Fault(
        "kinds that never meet, as of a frozen weight",
        "the incomplete bundle is dropped at the end of the step, and counted",
    ),
}

TENSORS = {
    47: Fault(
        "NaN and infinities",
        "norms, means and percentiles are NaN, counts are exact, histograms hold the finite elements",
    ),
    48: Fault("a NaN in a matrix that is decomposed", "its value is NaN; nothing fails, and the next one is right"),
    49: Fault("half precision", "everything is summed in single precision or more"),
    50: Fault(
        "integers, 8-bit floats, sparse, quantised and complex tensors; tensors without numbers",
        "they are read, complex ones as magnitudes; those without numbers are counted in ``health().skipped``",
    ),
    51: Fault(
        "tensors without elements, or with one",
        "a norm is 0, what is undefined is NaN or not published; there is no warning",
    ),
    52: Fault(
        "a ratio to nothing", "it is NaN, whatever is divided", "an infinity would spoil the axis of the whole curve"
    ),
    53: Fault(
        "a module that returns a tuple, a dictionary, a dataclass or nothing",
        "every tensor in it has a series of its own, named by its place",
    ),
    54: Fault(
        "outputs without gradient, ``no_grad`` and ``inference_mode``", "they have no layer gradient, which is no error"
    ),
    55: Fault("what is measured in ``inference_mode``", "it merges with what is measured outside"),
    56: Fault(
        "a module that is called several times, tied weights, checkpointing",
        "all calls of a step are one value over all their elements; a tied weight and a recomputed module are seen once",
        "calls are merged, not numbered, so that a curve does not depend on how often a module is called",
    ),
    57: Fault("accumulated gradients, clipping and closures", "a gradient is what the optimizer uses"),
    58: Fault(
        "weights that are computed from others",
        "their parameters are read, never the attribute, which may run code that changes training",
    ),
    59: Fault("a parameter or a module that is replaced", "the new one is seen, from the next step or epoch on"),
    60: Fault(
        "tensors too large to be counted in single precision, or to be copied",
        "counts are exact; an update there is no memory for is left out, and counted in ``health().skipped``",
    ),
}

FILES = {
    67: Fault(
        "a log directory that cannot be written",
        "``LogDirError`` with the reason, when the exporter is made; found out by writing",
    ),
    68: Fault(
        "a disk that is full",
        "training goes on; values wait, what does not fit is counted, the file stays whole and says what is missing",
    ),
    69: Fault(
        "a disk that fails, is over quota or read-only",
        "as a full one; with ``fallback=True`` a backend goes on among the temporary files, and says where",
    ),
    70: Fault(
        "a write that never returns",
        "training does not wait for it, and ``close()`` ends after 2 seconds",
        "training waits not even 50 ms for a step to be written; ``acked_step`` tells how far it is",
    ),
    71: Fault("a log directory that is deleted", "it is made again with a new file, and the log says so"),
    72: Fault("two writers in one directory in the same second", "each has a file of its own"),
    73: Fault("values after ``close()``", "they are counted; a file is never opened again"),
    74: Fault("two runs that begin at once", "each gets a directory of its own: the name is claimed by making it"),
    75: Fault("too many open files", "a process needs one, for any number of modules and metrics"),
    76: Fault("hundreds of modules and metrics", "they are one file, and one thread"),
    77: Fault(
        "names with ``..``, a leading ``/``, NUL, newlines or 10,000 characters",
        "they become short, printable, different tags, and never paths",
    ),
    78: Fault(
        "a file whose end a crash has cut off",
        "it is read up to there; nobody appends to it, a new start is a new file",
    ),
    79: Fault(
        "a flipped byte in the middle of a file",
        "``read`` passes over the line, ``recover`` over the record, and both go on behind it",
        "single precision is all an event file has; the lines of ``jsonl`` are the full record",
    ),
    80: Fault(
        "numbers beyond single precision", "``jsonl`` keeps every bit; in TensorBoard they are rounded, or infinite"
    ),
    81: Fault(
        "steps that are negative or no whole numbers",
        "only the exporter counts; what is restored from a checkpoint is checked",
        "there is no limit of the number of series",
    ),
    82: Fault("a clock that is set back", "times of values never decrease"),
}

ENDINGS = {
    83: Fault("SIGKILL, or the system runs out of memory", "all up to ``health().acked_step`` is in the file"),
    84: Fault("``flush()``, then the end", "when it returns true, all that was published before is on the disk"),
    85: Fault("SIGTERM, as clusters send it", "as SIGKILL; no handler of a signal is installed"),
    86: Fault("``os._exit``, ``abort``, a crash of an extension", "as SIGKILL"),
    87: Fault("an exception, Ctrl-C, the normal end", "the file is complete"),
    88: Fault("a power failure", "files are brought to the disk every 30 seconds"),
    89: Fault(
        "the end of a process whose disk does not answer",
        "it is delayed by 2 seconds at most, and the log says how many values are lost",
    ),
    90: Fault(
        "a run that is resumed from a checkpoint",
        "steps go on where it was saved; TensorBoard hides what an earlier file holds of later ones",
    ),
}

SECTIONS = {
    "arguments": ARGUMENTS,
    "plugins": PLUGINS,
    "tensors": TENSORS,
    "files": FILES,
    "endings": ENDINGS,
}

FAULTS = {number: fault for section in SECTIONS.values() for number, fault in section.items()}
