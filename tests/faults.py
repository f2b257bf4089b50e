"""The faults that can happen, and what ikkuna does about each; tests name them as ``@pytest.mark.fault(12)``.

The documentation's page on faults is generated from this list and from the marked tests; a test checks that no test is missing.
Numbers that are not listed here belong to other parts of the catalogue of faults.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault and its consequence.

    Parameters
    ----------
    what : str
        The fault.
    then : str
        What ikkuna does.
    aside : str
        An alternative that was considered, and why it was not chosen.
    """

    what: str
    then: str
    aside: str = ""


LEFT_OUT = {
    37: "A slow subscriber is not slowed down or disabled; ``health().seconds`` reports the time of each subscriber.",
    38: "A metric that never returns cannot be stopped in Python; a supervising thread would be another source of faults.",
    352: "A plugin whose import never ends blocks the call that imports it: a rule blocks ``watch()`` with rules, another plugin the "
    "call that uses its name.  Ctrl-C ends the wait.  Python cannot stop an import from outside, and a thread would keep its lock.",
    351: "Free-threaded builds of Python are not supported: counters and queues rely on the lock of the interpreter, and the native hooks "
    "do not declare that they work without it.",
}
"""Faults that ikkuna does not handle, and why."""

ARGUMENTS = {
    1: Fault("a model that is not a module", "``ConfigTypeError`` names the given type; no hook is registered"),
    2: Fault("a pair that is not a name and a module", "``ConfigTypeError`` names the types of the pair"),
    3: Fault("a misspelled kind", "``UnknownKindError`` suggests the nearest kind and lists all kinds"),
    4: Fault(
        "a backend that does not exist or cannot be imported",
        "the subscriber is refused, and the bus does not change",
    ),
    5: Fault("``subsample`` that is not an integer of at least 1", "``ConfigError`` names the given value"),
    6: Fault("a test accuracy that is measured every 0 steps", "``ConfigError`` names the given value"),
    7: Fault("``depth`` below -1 or not an integer", "``ConfigError`` names the possible values"),
    8: Fault("a module filter that selects no module", "``ConfigError`` lists the types of the modules"),
    9: Fault("a module that is added twice", "it is observed once, and a warning is logged"),
    10: Fault("two exporters on one model", "each receives every message once; closing one does not affect the other"),
    11: Fault(
        "no kind, a repeated kind, or a kind that is not a string",
        "``ConfigError``; a single string is accepted as a list of one kind",
    ),
    12: Fault("a ratio of one kind, of three kinds, or of a kind with itself", "``ConfigError`` names the given kinds"),
    13: Fault("an unknown backend", "``ConfigError`` lists the installed backends"),
    14: Fault(
        "a log directory that is empty, a number, bytes, or contains a NUL character",
        "``ConfigError``; the default directory is ``run``",
    ),
    15: Fault(
        "a test set that is empty or has no labels",
        "``ConfigError`` when the metric is constructed, not during training",
    ),
    16: Fault(
        "a scripted module",
        "``ConfigError``, because scripted modules do not support hooks; add the module before scripting it",
    ),
    17: Fault(
        "a model that was compiled and called before it is observed",
        "it is compiled once more and observed from then on; a warning is logged",
        "no option is needed: a second compilation costs seconds, a run without data costs the run",
    ),
    18: Fault("lazy modules", "they are observed from their first step, as soon as they have parameters"),
    19: Fault("an exporter that is used after ``close()``", "``ClosedError``; a second ``close()`` does nothing"),
    20: Fault(
        "a second model, or ``None``",
        "``ConfigError`` names the class of the first model, ``ConfigTypeError`` the given type",
    ),
}

PLUGINS = {
    21: Fault(
        "a plugin that fails during its import",
        "``PluginError`` with its distribution and the cause, when its name is first used; other plugins work",
    ),
    22: Fault("a plugin that calls ``sys.exit`` during its import", "``PluginError``; the process continues"),
    23: Fault("Ctrl-C during the import of a plugin", "``KeyboardInterrupt`` is raised"),
    24: Fault("an entry point that does not refer to a subscriber", "``PluginError`` names the object that was found"),
    25: Fault(
        "two distributions that register the same name",
        "``PluginError`` names both, also if one of them is ikkuna",
        "the built-in metric has no priority, because the user should know that the name is ambiguous",
    ),
    26: Fault(
        "a plugin whose name is not an identifier, or is private",
        "it is ignored, and a warning is logged",
        "this is not an error, because listing plugins must not fail",
    ),
    27: Fault(
        "another package with damaged metadata",
        "it is skipped, a warning names it, and all other plugins work",
    ),
    28: Fault("a subscriber whose constructor fails", "its exception is raised, and the bus does not change"),
    29: Fault(
        "a metric that always fails",
        "it is logged at the 1st and the 10th consecutive failure of the same method, then disabled; "
        "the error does not change training, and other metrics continue",
    ),
    30: Fault(
        "a metric that fails sometimes",
        "failures are counted and logged; a success resets the count of failures in a row",
    ),
    31: Fault(
        "Ctrl-C and ``sys.exit`` in a metric",
        "they are raised; every other exception of the metric is caught, also ``GeneratorExit`` and ``CancelledError``",
    ),
    32: Fault("a metric that runs out of device memory", "it is disabled at once"),
    33: Fault(
        "metrics that depend on each other in a circle",
        "``ConfigError`` names the circle when the last of them is registered",
        "there is no limit of depth during training, because a chain without a circle ends",
    ),
    34: Fault(
        "a result of an undeclared kind",
        "it counts as a failure of the metric; the error message lists the declared kinds",
    ),
    35: Fault(
        "registering, removing or closing during the delivery of messages",
        "the change takes effect at the next message or step",
    ),
    36: Fault("the order of subscribers", "subscribers are called in the order of registration, in every process"),
    39: Fault("a metric that calls the model", "this call is not recorded; ``evaluate`` records a call of the model"),
    40: Fault(
        "a metric that writes to a borrowed tensor",
        "it is disabled, and the log states what it changed; writes through ``.data`` are detected by ``check_subscriber`` in a test",
        "there is no slow mode that copies every tensor",
    ),
    41: Fault("a metric that keeps borrowed tensors", "the tensors hold no graph; emitted values are floats"),
    42: Fault(
        "a tensor that is overwritten after ``measure``",
        "the result of ``measure`` is copied at once, even if it is a view",
    ),
    43: Fault("an object whose ``repr`` or ``str`` fails", "error messages contain the name of its class instead"),
    44: Fault(
        "a log handler or filter that fails",
        "its exception is ignored; ``KeyboardInterrupt`` and ``SystemExit`` are raised",
    ),
    45: Fault("a metric that returns a value", "the value is ignored, because hooks return nothing"),
    46: Fault(
        "joined kinds of which one is missing",
        "the incomplete bundle is dropped at the end of the step and counted, except that of a parameter that is not trained",
    ),
    220: Fault(
        "a ``measure`` that returns a number instead of a tensor",
        'it counts as a failure of the metric; the error message states what to return, and ``on_error="raise"`` raises it',
    ),
    313: Fault(
        "a metric that shows a matrix or a histogram that cannot be stored, or measures rows that cannot be copied to the host",
        "the value is refused and counts as a failure of this metric; backends and the values of other metrics are not affected",
        "failures of a backend are counted for each metric, so that a value which only a backend refuses does not disable it",
    ),
}

TENSORS = {
    47: Fault(
        "NaN and Inf",
        "norms, means and percentiles are NaN, counts are exact, histograms contain the finite elements",
    ),
    48: Fault("NaN in a matrix that is decomposed", "the value is NaN; no error occurs, and the next value is right"),
    49: Fault("half precision", "all sums use single precision or more"),
    50: Fault(
        "integers, 8-bit floats, sparse, quantised and complex tensors; tensors without numbers",
        "they are measured, sparse tensors with the zeros that they do not store, complex tensors by magnitude, or as pairs of reals "
        "where two are compared; "
        "tensors without numbers, such as meta, fake and nested ones, are left out and counted in ``health().skipped``",
    ),
    51: Fault(
        "tensors with no element or one element",
        "a norm is 0, an undefined value is NaN or not published, and no warning is raised",
    ),
    52: Fault(
        "a division by zero in a ratio",
        "the result is NaN for every dividend",
        "an infinity would make the axis of the whole curve unusable",
    ),
    53: Fault(
        "a module that returns a tuple, a dictionary, a dataclass or ``None``",
        "each tensor in the output is a separate series, named by its position",
    ),
    54: Fault(
        "outputs without gradients, ``no_grad`` and ``inference_mode``",
        "no layer gradient is published, and no error is raised",
    ),
    55: Fault("values that are measured in ``inference_mode``", "they are merged with values measured outside of it"),
    56: Fault(
        "a module that is called several times, tied weights, checkpointing",
        "all calls of a step are merged into one value; tied weights and recomputed modules are measured once",
        "calls are merged, not numbered, so that a curve does not depend on the number of calls",
    ),
    57: Fault(
        "accumulated gradients, clipping and closures", "the published gradient is the one that the optimizer uses"
    ),
    58: Fault(
        "weights that are computed from other parameters",
        "the parameters are read; the attribute is not read, because this can run code that changes training",
    ),
    59: Fault(
        "a parameter that is replaced, tied, resized or removed",
        "the new one is observed from the next sampled step on",
    ),
    60: Fault(
        "tensors that are too large to count in single precision, or weights that are too large to copy",
        "counts are exact; if there is no memory to copy a weight before the step, its update is skipped and counted in "
        "``health().skipped``",
    ),
    204: Fault(
        "a transformer layer in evaluation mode, which torch computes by one operator if no module in it has a hook",
        "it is computed by that operator also while it is observed; the modules inside are not observed then, and one line says so",
    ),
    205: Fault(
        "a storage that is resized after a tensor in it was measured, as sharded training does",
        "it is resizable; tensors are read without ``Tensor.numpy``, which forbids it for good",
    ),
    212: Fault(
        "a histogram of data with a NaN or an infinity, or of a lazy negative",
        "it lies between the extrema of the finite elements; a lazy negative is counted with its sign",
    ),
    215: Fault(
        "quantised weights",
        "they are dequantised if the tensor offers it; packed bytes are left out, counted once in ``health().skipped`` and logged once",
    ),
    218: Fault(
        "gradients of a loss that a gradient scaler has multiplied",
        "they are divided by the scale, in at least float32; the first step with another scaler has no layer gradients",
    ),
    219: Fault(
        "a trainable parameter that no optimizer has, or that no backward reaches",
        "its gradients are published like all others; a warning names it once, after 100 steps if it never has a gradient",
        "a layer that is used once in 100 steps is not reported",
    ),
    210: Fault(
        "a norm of order 0 or infinity of data with NaN or Inf",
        "with ``finite_only=True`` only finite elements count; otherwise it is NaN, whatever other metrics are registered",
    ),
    213: Fault(
        "a value that lies between two numbers of a float format, such as half of its least number",
        "``PrecisionSubscriber`` counts it where torch's cast rounds it: a value that is rounded to 0 is an underflow",
    ),
    214: Fault(
        "code that was written for delve, WeightWatcher or nnstat",
        '``compat="delve"`` and ``compat="weightwatcher"`` compute what these compute, and a string with special characters, '
        "such as ``.*query.*``, is a regular expression for `NetDict`",
    ),
    316: Fault(
        "a tensor whose elements share memory, such as a broadcast output",
        "each stored element is measured once and counted as often as it occurs; overlapping elements are read in parts",
    ),
    306: Fault(
        "a tensor whose storage was shrunk or freed after it was created, as by sharded training",
        "nothing reads it; it is counted in ``health().skipped``",
    ),
}

FILES = {
    67: Fault(
        "a log directory that is not writable",
        "``LogDirError`` with the reason when the exporter is constructed, or, for the default directory, when a metric that "
        "writes files is registered; the check creates a temporary file in it or in the nearest directory that exists",
        "a directory that becomes unwritable later counts as a disk that fails",
    ),
    68: Fault(
        "a full disk",
        "training continues; values wait in memory, values that do not fit are counted, and the file stays valid and reports the loss",
    ),
    69: Fault(
        "a disk that fails, is over quota or read-only",
        "as for a full disk; with ``fallback=True`` the backend continues in a new file in the temp directory and logs its path; "
        "if that is not possible, the first file is tried again",
    ),
    70: Fault(
        "a write that never returns",
        "training does not wait; ``close()`` waits 2 seconds by default, and ``flush()`` as long as its argument says",
        "a short wait for each step would delay training and store no more; ``acked_step`` tells which step was written",
    ),
    71: Fault(
        "a log directory that is deleted",
        "it is created again with a new file and ``run.json``, and a warning is logged",
    ),
    72: Fault("two writers in one directory in the same second", "each writer has its own file"),
    73: Fault("values after ``close()``", "they are counted as dropped; the file is not opened again"),
    74: Fault(
        "two runs that start at the same time", "each run has its own directory, because creating it claims the name"
    ),
    75: Fault(
        "too many open files",
        "a backend opens one file for any number of modules and metrics; if it cannot, values wait in memory, and it tries again",
    ),
    76: Fault("hundreds of modules and metrics", "they share one file and one thread"),
    77: Fault(
        "names with ``..``, a leading ``/``, NUL, newlines or 10,000 characters",
        "they become short, printable and distinct tags; they are never used as paths",
    ),
    78: Fault(
        "a file that was truncated by a crash",
        "its complete records are readable; a new start writes a new file",
    ),
    79: Fault(
        "a flipped byte in the middle of a file",
        "``recover`` skips the record and continues after it; ``read`` skips lines that are no JSON, but a line has no checksum, "
        "so that a changed digit is not noticed",
        "an event file has single precision only; the lines of ``jsonl`` are the full record",
    ),
    80: Fault(
        "numbers beyond single precision",
        "``jsonl`` keeps every bit; in TensorBoard they are rounded, or infinite",
    ),
    81: Fault(
        "steps that are negative or not integers",
        "only the exporter counts steps; the state of a checkpoint is checked when it is loaded",
        "the number of series is not limited",
    ),
    82: Fault(
        "a system clock that is set back or forward, also between two trainings of one run",
        "the times of values never decrease, and a later file has a later name, by which readers sort",
    ),
    301: Fault(
        "an error of fsync, after which the system may discard what was not synchronised",
        "the blocks since the last success, with all of their first step, are written again to a new file, which replaces the end "
        "of the old one, so that TensorBoard and readers of JSON find each value once; if that fails, "
        "they count as lost, ``flush()`` and ``close()`` return ``False``, and the error is logged once",
        "``acked_step`` returns to the last step on the disk until the others are written again; "
        "an fsync after each step would cost milliseconds; an image of an earlier step counts as lost if the old end cannot be cut",
    ),
    304: Fault(
        "a slow disk at the first value",
        "training does not wait: the thread that writes creates the directory and the file",
    ),
    305: Fault(
        "a short fault at the first value: too many open files, no inodes, no permission, a full disk",
        "values wait in memory, and the directory and the file are tried again",
    ),
    311: Fault(
        "the run cannot be written, and ``health()`` is read then or after ``close()``",
        "``health().unwritable`` names the backends until they have recovered; "
        "``dropped``, ``acked_step`` and ``unwritable`` are kept after ``close()``",
    ),
    320: Fault(
        "a file of JSON lines or an event file that another program has prepared to disturb its reader",
        "lines that are no entries are skipped, no error is raised, and the time to read it is proportional to its size",
    ),
    321: Fault(
        "other code closes the descriptor of the file, and opens another file under its number",
        "nothing is written to the other file; the own file is opened again",
    ),
    322: Fault(
        "a file that another process truncates, and then a write that is cut off",
        "the part of the block is removed, and no zeros are left in the file",
    ),
    324: Fault(
        "a link with the name of an unfinished snapshot or picture, which another user has created",
        "it is not followed: unfinished files have random names, and existing files and links are not opened",
    ),
    325: Fault(
        "a kind whose picture would have the same file name as that of another kind",
        "each picture has a file of its own",
    ),
    328: Fault(
        "a backend whose ``acked_step`` is not an integer or raises",
        "it counts as a backend that stores nothing; ``health()`` does not raise",
    ),
    329: Fault(
        "values that were lost before a run is closed",
        "the log and the file state how many of which steps are lost",
    ),
}

ENDINGS = {
    350: Fault(
        "processes that ``torch.multiprocessing`` starts, with fork, spawn or forkserver",
        "each has a run of its own and keeps all values when it ends without ``close()``; an observed model that it receives has no "
        "hooks, or, after a fork, hooks that record nothing",
        "an exception that ends such a process does not reach ``sys.excepthook``, so no dump is written, unless it leaves "
        "``with ikkuna.watch(...)``",
    ),
    83: Fault("SIGKILL, or the system runs out of memory", "all values up to ``health().acked_step`` are in the file"),
    221: Fault(
        "``health()`` after ``close()``",
        "it states what was true at the end: the acknowledged step, the lost values and the time of each metric",
    ),
    84: Fault(
        "``flush()`` of the run, then the end",
        "if it returns ``True``, all values of the steps committed before it are on the disk, except those in ``health().dropped``",
    ),
    85: Fault("SIGTERM, which clusters send", "as for SIGKILL; ikkuna installs no signal handler"),
    86: Fault("``os._exit``, ``abort``, a crash of an extension", "as for SIGKILL"),
    87: Fault("an exception, Ctrl-C, the normal end", "the file is complete"),
    88: Fault("a power failure", "files are synchronised with the disk every 30 seconds"),
    89: Fault(
        "the end of a process whose disk does not respond",
        "it is delayed by at most 2 seconds, and the log states the number of lost values",
    ),
    90: Fault(
        "a run that is resumed from a checkpoint",
        "steps continue from the checkpoint; TensorBoard hides later steps of an earlier file",
    ),
    91: Fault(
        "a fork while a thread of ikkuna works",
        "the child waits for no thread of its parent, and takes over none of its work",
    ),
}

THREADS = {
    314: Fault(
        "a log handler that fails in a thread that writes, or in ``epoch_finished()``",
        "its exception is ignored, and the thread continues to write",
    ),
    302: Fault(
        "Ctrl-C at any moment of a step or of ``close()``",
        "the interrupted step is lost, or lacks values; the next forward is recorded again, and training is not changed; "
        "after one in ``close()``, a second call does what is left",
        "the exception is not delayed, because a metric may run for minutes",
    ),
    303: Fault(
        "an exception of a signal handler, such as a time limit, in the code of a metric or of ikkuna",
        "it is raised to the user; any other exception of a metric is caught, also if it is no ``Exception``",
        "signals are not blocked during hooks, because another thread would receive them and Python would run the handler nevertheless",
    ),
    317: Fault(
        "Ctrl-C while the values of a step are delivered",
        "those that were delivered are written under their own step, and the others are lost",
    ),
    307: Fault(
        "several threads train at the same time, each with an exporter, while others open and close exporters",
        "every step of every thread is counted: a single pair of torch's global optimizer hooks serves all exporters, "
        "and stays registered until the process ends",
        "a pair for each exporter changes torch's dictionary of hooks while other threads iterate over it, which raises in their steps",
    ),
    309: Fault(
        "a thread that dies while it starts, for want of memory",
        "nothing waits for it; values wait in memory, and it is started again after a pause",
    ),
    326: Fault(
        "no thread can be started",
        "training does not wait for the disk, an error is logged once, and values wait in memory; ``flush()`` and ``close()`` write them",
    ),
}

MODELS = {
    201: Fault(
        "blocks that are compiled one by one (``block.compile(fullgraph=True)``)",
        "equal blocks share a graph, and a second one for sampled steps: the number of a module is an input of the graph",
        "a graph for each block would exceed the recompilation limit, which ends training",
    ),
    202: Fault(
        "a model that is given to ``fully_shard`` after it was added, before or after its first step",
        "its shards are found at the next sampled step, and the values are those of one process; parameters that FSDP has gathered, "
        "and whose storage it frees, are never read, so that there are no gradients of micro-batches",
    ),
    203: Fault(
        "a weight that gets another shape while it is observed (``resize_token_embeddings``, ``weight.data = …``)",
        "the new shape is measured from the next step on; no node of autograd is kept beyond a step, so the backward does not raise",
    ),
    206: Fault(
        "an exporter, or the result of ``watch``, that no variable refers to",
        "it records until it is closed or the model is deleted; its hooks, thread and file are then released without lost values",
    ),
    207: Fault(
        "copying, pickling or saving a model while it is observed",
        "the copy has no hooks of ikkuna, can be scripted, and can be loaded where ikkuna is not installed",
    ),
    208: Fault(
        "exporters that are dropped without ``close()``",
        "the garbage collector closes them after their model is gone, and every new exporter calls it if there can be such",
    ),
    209: Fault(
        "two calls of one module in a compiled model return the same tensor, or receive the same gradient",
        "both count: each call in a graph has its own number, so the compiler does not merge the operators of two calls",
    ),
    211: Fault(
        "a layer that is replaced, added, removed, pruned or given an adapter while the model is observed",
        "the modules are found again at the next sampled step, pass or epoch: the removed layer is no longer published, the new one is "
        "published under its name, and a warning is logged once; in a compiled model one step later",
    ),
    216: Fault(
        "a stage of a pipeline, whose first forward waits for another rank",
        "the ranks meet at the end of the first step, and all publish the numbers of one process; "
        "a model of which the process runs only a stage is refused, and stages with equal names are logged as an error",
    ),
    217: Fault(
        "an output that does not depend on the data, such as an embedding of positions, on several ranks",
        "it counts once where other activations differ between ranks",
        "its gradients count as those of different elements, since their sum over ranks would need the tensors",
    ),
    222: Fault(
        "a cell of a notebook that is run again, or a second ``watch`` of one model",
        "the earlier exporter is closed, a warning says so, and a new run begins",
        "an exporter that a variable refers to is closed only by ``watch``; otherwise ``ConfigError`` names the module that both observe",
    ),
    223: Fault(
        "a preset that does not exist, a class instead of a subscriber, a star import of metrics",
        "the error lists the presets, or says to pass an instance; the star import offers every installed metric",
    ),
    224: Fault(
        "an evaluation or a probe that draws random numbers",
        "the random state of the CPU, of every device of the accelerator, and of the generators of loaders and samplers is restored",
    ),
    315: Fault(
        "layers that no longer match ``module_filter`` after they were replaced, or a filter that raises in training",
        "nothing is observed there, and the warning names the removed modules; no error reaches the loop",
    ),
    312: Fault(
        "``load_state_dict`` with a checkpoint of an earlier step",
        "``health().acked_step`` is at most the step of the checkpoint, until later steps are written again",
    ),
    318: Fault(
        "a hundred runs in one process whose exporters are never closed",
        "at most two of them are open at a time, each with one thread and two files, one of which is a lock",
    ),
    319: Fault("a sparse parameter", "its weights are measured, and no error reaches the loop or the log"),
    323: Fault(
        "a relative ``log_dir`` and a later change of the current directory, or a symbolic link to nothing",
        "the directory is resolved once; a link to nothing is refused with ``LogDirError``",
    ),
    327: Fault(
        "modules that are nested nearly as deep as Python's recursion limit allows",
        "hooks need room for at most 8 further levels of modules, of about 245 that fit into the default limit",
    ),
    340: Fault(
        "names, messages or files that contain escape sequences, NUL, line feeds, or marks of bidirectional text",
        "they are shown as escape sequences of Python in all commands, findings, errors, log lines, summaries and representations; "
        "a name never begins a new line of a command or a log",
    ),
    342: Fault(
        "a process that continues a run while another process, perhaps of another machine, still writes it",
        "it writes to a new directory, with an ``id`` of its own, and logs a warning that names the other process; "
        "the lock of a process that has ended in whatever way does not last",
        "a file with the number of its owner does not show whether that process of another machine is alive; "
        "a lock of BSD is kept by the workers of a data loader",
    ),
    341: Fault(
        "a subscriber that publishes a message that it takes, or a circle of such subscribers",
        "the subscriber in which the circle is found is disabled at once; other subscribers and training go on",
    ),
}

LIBRARY = {
    308: Fault(
        "another user who can write to the cache of the native library, to a directory above it, or to the temp directory",
        "nothing there is used: the library is compiled where others cannot write, or numpy measures",
        "a sticky directory of root, such as ``/tmp``, is accepted as a parent; a directory that the group can write is not",
    ),
    354: Fault(
        "a temp directory from which no program may run (``noexec``)",
        "the native library is loaded from memory; on systems that refuse this as well, numpy measures, which is logged once",
    ),
    353: Fault(
        "another version of torch or of Python with the same cache of native libraries",
        "versions are a part of the name of a library that uses them, so each version compiles its own",
        "a build of torch that was changed under its old version and path is not noticed; delete ``~/.cache/ikkuna`` then",
    ),
    310: Fault(
        "a cached library that is damaged, foreign, or not a regular file; a compiler that fails, hangs or makes no library",
        "the library is compiled again and replaced; if the compiler fails, one line is logged, and numpy measures; "
        "it is tried again after an hour",
    ),
}

RECORDER = {
    501: Fault(
        "a disk that refuses dumps",
        "the first failure is logged, ``health().failed_dumps`` counts all; failures do not count as dumps of the run, so the disk is "
        "used again when it recovers",
    ),
    502: Fault(
        "a run with more mistakes than dumps",
        "``max_dumps`` are written, which is logged once, and one more at the end of the process",
    ),
    503: Fault(
        "a process that is killed while it writes a dump",
        "no reader sees it, and the next run in the same log directory removes it; a lock marks those of living processes",
        "without locks, as on some network file systems, it is removed after a day",
    ),
    504: Fault(
        "a model with more layers than the recorder has memory for",
        "``max_memory`` holds: a burst counts histograms of some modules only, and what does not fit is not copied, which is logged",
    ),
    505: Fault(
        "a machine or a container that is short of memory",
        "states and batches that need more than half of what is left are not copied, and no burst follows a dump",
    ),
    506: Fault(
        "a dump that is damaged, or made to harm its reader",
        "``DumpError`` names the file or the field; a file never becomes larger in memory than it is, or than 64 MiB; no code runs",
    ),
    507: Fault(
        "a pipe or a device in the place of a file of a dump, or of ``run.json``",
        "it is not opened: ``DumpError``, or a run without configuration",
    ),
}

SECTIONS = {
    "arguments": ARGUMENTS,
    "plugins": PLUGINS,
    "tensors": TENSORS,
    "models": MODELS,
    "library": LIBRARY,
    "files": FILES,
    "endings": ENDINGS,
    "threads": THREADS,
    "recorder": RECORDER,
}

FAULTS = {number: fault for section in SECTIONS.values() for number, fault in section.items()}
