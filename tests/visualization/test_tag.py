import re
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ikkuna.backends.tensorboard import STATISTICS
from ikkuna.store.names import Series, encode, heatmap_tag, overview_tag, series_tag, text_tag

NAMES = st.text(max_size=40) | st.text("./%~: -ab01", max_size=8)
LONG = st.text("ab/.\u00e4\ud800", min_size=200, max_size=400)
KINDS = NAMES | st.sampled_from(["Network", "Overview", "Heatmaps", "Text", "loss", "weights_percentile_2.5"])
PASSES = st.sampled_from(["training", "testing"]) | NAMES
SERIES = st.builds(Series, KINDS | LONG, st.none() | NAMES | LONG, PASSES)


def tags(series):
    """Yield every tag of a series, with its meaning."""
    identity = (series.kind, series.name, series.pass_name)
    yield series_tag(series), identity
    for statistic in STATISTICS:
        yield overview_tag(series, statistic), ("overview", series.kind, series.pass_name, statistic)
    yield text_tag(series.kind), ("text", series.kind)
    yield heatmap_tag(Series(series.kind)), ("image", series.kind)


@pytest.mark.fault(77)
@given(SERIES, SERIES)
@example(Series("a.b", "x"), Series("a", "x", "b"))
@example(Series("a", "5", "5"), Series("a.5", "5"))
@example(Series("a/b", "c"), Series("a", "b/c"))
@example(Series("Network", "loss"), Series("loss"))
@example(Series("a", "%2F"), Series("a", "/"))
@example(Series("a", "x", "5"), Series("a.5", "x"))
@example(Series("a_min", None), Series("a", None))
@example(Series("a", "x", ""), Series("a", "x"))
def test_no_two_things_share_a_tag(first, second):
    found = {}
    for tag, identity in (*tags(first), *tags(second)):
        assert found.setdefault(tag, identity) == identity


@pytest.mark.fault(77)
@given(SERIES)
@example(Series("a", "x", ".b"))
@example(Series("", "", ""))
def test_a_tag_is_short_relative_and_printable(series):
    for tag, _ in tags(series):
        assert len(tag.encode()) <= 250
        assert ".." not in tag
        assert not tag.startswith("/")
        assert "//" not in tag
        assert re.fullmatch(r"[\w./ :%~-]+", tag)


@given(st.text(min_size=1))
@example("%41")
@example("%")
def test_a_name_can_be_read_back(name):
    assert unquote(encode(name), errors="surrogatepass") == name


@given(st.from_regex(r"\A[a-z_0-9]+(\.[a-z_0-9:]+)*(/[a-z_0-9]+)?\Z"))
def test_an_ordinary_name_stays_as_it_is(name):
    assert encode(name) == name
    assert encode(encode(name)) == name


@pytest.mark.parametrize(
    ("series", "tag"),
    [
        (Series("weights_norm2", "features.0"), "weights_norm2/features.0"),
        (Series("weights_norm2", "lstm.weight_ih_l0", "testing"), "weights_norm2.testing/lstm.weight_ih_l0"),
        (Series("activations_mean", "lstm:1.0"), "activations_mean/lstm:1.0"),
        (Series("loss"), "Network/loss"),
        (Series("loss", None, "testing"), "Network/loss.testing"),
        (Series("weights_percentile_2.5", "fc"), "weights_percentile_2.5/fc"),
        (Series("loss", "../../etc"), "loss/.%2E/.%2E/etc"),
        (Series("loss", "/abs"), "loss/%2Fabs"),
        (Series("loss", "a\nb\0"), "loss/a%0Ab%00"),
        (Series("Network", "fc"), "%4Eetwork/fc"),
        (Series("loss", "größe"), "loss/größe"),
    ],
)
def test_tags_people_will_see(series, tag):
    assert series_tag(series) == tag


def test_a_long_name_keeps_its_beginning():
    first, second = (series_tag(Series("loss", "x" * 300 + end)) for end in "ab")
    assert first.startswith("loss/xxxx")
    assert first != second
