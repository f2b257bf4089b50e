"""The identity of curves, their tags in TensorBoard, and the names of their files."""

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b

from ikkuna.store.quantity import NEUTRAL, Quantity


@dataclass(frozen=True, slots=True)
class Series:
    """The identity of a curve: a kind, a module and a pass.

    Parameters
    ----------
    kind : str
        The kind of message shown, such as ``"weights_norm2"``.
    name : str, optional
        The module, if needed with the name of its parameter or output (``lstm.weight_ih_l0``, ``lstm:1.0``);
        ``None`` for a value of the whole network.
    pass_name : str
        ``"training"``, or another pass such as ``"testing"``.
    title : str, optional
        Shown instead of `kind`.
    ylims : (float, float), optional
        Limits of the value axis, for backends that draw axes.
    quantity : Quantity
        What the kind is; it does not distinguish series.
    """

    kind: str
    name: str | None = None
    pass_name: str = "training"
    title: str | None = None
    ylims: tuple[float, float] | None = None
    quantity: Quantity = field(default=NEUTRAL, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The kind, and the name if there is one, as people read it: ``logged/reward``."""
        return self.kind if self.name is None else f"{self.kind}/{self.name}"


@dataclass(frozen=True, eq=False)
class SeriesGroup:
    """Curves of one kind and pass that get their values together, such as those of all modules.

    A group equals only itself, and the same one comes with the values of many steps, so that backends can keep what they
    have computed for it.

    Parameters
    ----------
    kind, pass_name, title, ylims, quantity
        See `Series`.
    names : tuple of str or None
        The name of each series.

    Examples
    --------
    >>> [series.name for series in SeriesGroup("weights_norm2", ("conv", "fc")).series]
    ['conv', 'fc']
    """

    kind: str
    names: tuple[str | None, ...]
    pass_name: str = "training"
    title: str | None = None
    ylims: tuple[float, float] | None = None
    quantity: Quantity = NEUTRAL

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """The series in order."""
        rest = self.pass_name, self.title, self.ylims, self.quantity
        return tuple(Series(self.kind, name, *rest) for name in self.names)


_LIMIT = 250  # bytes
_RESERVED = (
    "Network",
    "Rules",
    "Overview",
    "Dashboard",
    "Heatmaps",
    "Matrices",
    "Text",
)  # a kind with one of these names is escaped
# Parts of paths such as ".." and empty names, and every character that some tool replaces.
_UNSAFE = re.compile(r"[^\w./ :-]|^/|/\Z|(?<=/)/|(?<=\.)\.|^\.(?=/|\Z)|(?<=/)\.(?=/|\Z)")


def _escape(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def encode(name: str) -> str:
    """Return `name` with the characters that tools would replace written as ``%XX`` of their UTF-8 bytes.

    Letters, digits, ``_ . / : -`` and spaces are unchanged.
    ``%`` is encoded too, so that different names stay different; an empty name becomes ``%``.

    Examples
    --------
    >>> encode("features.0"), encode("100%"), encode("/etc/../x")
    ('features.0', '100%25', '%2Fetc/.%2E/x')
    """
    return _UNSAFE.sub(lambda found: _escape(found.group()), name) or "%"


def _cut(tag: str, limit: int = _LIMIT) -> str:
    """Shorten a long tag; ``~`` occurs in no other tag, and a hash distinguishes shortened tags."""
    data = tag.encode()
    if len(data) <= limit:
        return tag
    mark = "~" + blake2b(data, digest_size=12).hexdigest()
    return data[: limit - len(mark)].decode(errors="ignore") + mark


@cache
def _group(kind: str, pass_name: str) -> str:
    """Return ``kind`` or ``kind.pass``; the pass begins after the first dot that no digit follows."""
    head = re.sub(r"\.(?![0-9])", "%2E", encode(kind).replace("/", "%2F"))
    if pass_name == "training":
        return head
    tail = encode(pass_name).replace("/", "%2F").replace(".", "%2E")
    return f"{head}.{re.sub(r'^[0-9]', lambda found: _escape(found.group()), tail)}"


def series_tag(series: Series) -> str:
    """Return the tag of a series.

    Examples
    --------
    >>> series_tag(Series("weights_norm2", "features.0"))
    'weights_norm2/features.0'
    >>> series_tag(Series("loss", None, "testing"))
    'Network/loss.testing'
    """
    group = _group(series.kind, series.pass_name)
    if series.name is None:
        return _cut(f"Network/{group}")
    first = _escape(group[0]) + group[1:] if group in _RESERVED else group
    return _cut(f"{first}/{encode(series.name)}")


def decode(text: str) -> str:
    """Return the name that :func:`encode` has encoded.

    Examples
    --------
    >>> decode(encode("/etc/../x 100%")), decode("%")
    ('/etc/../x 100%', '')
    """
    if text == "%":
        return ""
    data = re.sub(rb"%([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return data.decode("utf-8", "surrogatepass")


def series_of_tag(tag: str) -> Series | None:
    """Return the series of a tag made by :func:`series_tag`; ``None`` for another tag, or one that was shortened.

    Runs of earlier versions have tags below ``Rules/`` for values that only rules read, those of the network without ``Network/``.

    Examples
    --------
    >>> series_of_tag("weights_norm2/features.0")
    Series(kind='weights_norm2', name='features.0', pass_name='training', title=None, ylims=None)
    >>> series_of_tag("Network/loss.testing").pass_name, series_of_tag("Overview/weights_norm2_median")
    ('testing', None)
    """
    head, separator, rest = tag.partition("/")
    if not separator or "~" in tag or head in _RESERVED[2:]:
        return None
    if head == "Rules":
        head, separator, rest = rest.partition("/")
        group, name = head, rest if separator else None
    else:
        group, name = (rest, None) if head == "Network" else (head, rest)
    split = re.search(r"\.(?![0-9])", group)
    kind, pass_name = (group[: split.start()], group[split.end() :]) if split else (group, "training")
    try:
        own = None if name is None else decode(name)
        return Series(decode(kind), own, decode(pass_name))
    except UnicodeDecodeError:
        return None


def dashboard_tag(series: Series) -> str:
    """Return the tag of a copy of a series of the network, in the first group of cards that TensorBoard shows.

    Examples
    --------
    >>> dashboard_tag(Series("loss", None, "testing"))
    'Dashboard/loss.testing'
    """
    return _cut(f"Dashboard/{_group(series.kind, series.pass_name)}")


def overview_tag(series: Series, statistic: str) -> str:
    """Return the tag of a statistic over all modules of the kind and pass of `series`.

    Examples
    --------
    >>> overview_tag(Series("weights_norm2", "features.0"), "median")
    'Overview/weights_norm2_median'
    """
    return _cut(f"Overview/{_group(series.kind, series.pass_name)}_{statistic}")


def heatmap_tag(series: Series) -> str:
    """Return the tag of the heat map of all modules of the kind and pass of `series`.

    Examples
    --------
    >>> heatmap_tag(Series("weights_norm2", "features.0")), heatmap_tag(Series("activations_mean", "fc", "testing"))
    ('Heatmaps/weights_norm2', 'Heatmaps/activations_mean.testing')
    """
    title = series.kind if series.pass_name == "training" else f"{series.kind}.{series.pass_name}"
    return _cut(f"Heatmaps/{encode(title)}")


def natural_key(name: str) -> list[str | int]:
    """Return a sorting key with which 2 comes before 10, as in TensorBoard.

    Examples
    --------
    >>> sorted(["features.10", "features.2", "fc"], key=natural_key)
    ['fc', 'features.2', 'features.10']
    """
    parts = re.split(r"([0-9]+)", name)  # texts and numbers alternate, so the same positions have the same types
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def matrix_tag(series: Series) -> str:
    """Return the tag of a series of matrices.

    Examples
    --------
    >>> matrix_tag(Series("cka_between_layers")), matrix_tag(Series("cosine", "fc", "testing"))
    ('Matrices/cka_between_layers', 'Matrices/cosine.testing/fc')
    """
    own = "" if series.name is None else f"/{encode(series.name)}"
    return _cut(f"Matrices/{_group(series.kind, series.pass_name)}{own}")


def text_tag(title: str) -> str:
    """Return the tag of a page of text.

    Examples
    --------
    >>> text_tag("Model")
    'Text/Model'
    """
    return _cut(f"Text/{encode(title)}")


def picture_name(series: Series, ending: str = "") -> str:
    """Return the name, without suffix, of the file with the picture of the kind and pass of `series`.

    Parameters
    ----------
    series : Series
        One of the series in the picture.
    ending : str
        ``""`` for values, ``"_histograms"`` or ``"_matrix"``.
        In kinds and passes that end like this the underscore is encoded, so that different pictures have different names.

    Examples
    --------
    >>> picture_name(Series("a"), "_histograms"), picture_name(Series("a_histograms"))
    ('a_histograms', 'a%5Fhistograms')
    >>> picture_name(Series("weights_norm2", "fc")), picture_name(Series("a/b", "fc", "testing"))
    ('weights_norm2', 'a%2Fb.testing')
    """
    name = re.sub(r"_(?=(histograms|matrix)\Z)", "%5F", _group(series.kind, series.pass_name))
    return _cut(name, 200) + ending
