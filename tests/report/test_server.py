"""The pages of `ikkuna ui`: only this machine with the token reads them, and they follow a run that is being written."""

import http.client
import json
import re
import threading
import urllib.parse

import pytest

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.diagnosis import Finding
from ikkuna.diagnosis.stored_findings import event_line, event_text
from ikkuna.errors import ConfigError
from ikkuna.report.server import RunServer
from ikkuna.store import find_runs
from ikkuna.store.names import Series
from ikkuna.store.values import ModuleEntry

HOSTILE = "<script>alert('x')</script>"


class Writer:
    """A run that is being written."""

    def __init__(self, directory, backend=TensorBoardBackend, kind="weights_norm2"):
        directory.mkdir(parents=True)
        self.directory, self.kind = directory, kind
        self.backend = backend()
        self.backend.open(directory)
        self.backend.describe([ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in ("a", "b", "c")])

    def step(self, step, loss=0.5):
        self.backend.add_scalar(Series("loss"), loss, step)
        for i, name in enumerate("abc"):
            self.backend.add_scalar(Series(self.kind, name), 1.0 + i, step)
        self.backend.commit(step)
        assert self.backend.flush(10)

    def find(self, finding):
        text = event_line(event_text({"event": "opened", "finding": finding.as_dict()}), finding.step, 0.0)
        with open(self.directory / "findings.1.jsonl", "a") as file:
            file.write(text)


@pytest.fixture
def writer(tmp_path):
    writer = Writer(tmp_path / "runs" / "run0001")
    for step in range(20):
        writer.step(step, 1.0 / (1 + step))
    yield writer
    writer.backend.close()


@pytest.fixture
def server(writer, tmp_path):
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "run0002").symlink_to(tmp_path / "outside")
    with RunServer(tmp_path / "runs") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks at `shutdown`
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, host=None, cookie=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {"Cookie": f"{server.cookie}={server.token}" if cookie is None else cookie}
    connection.request(method, path, headers=headers | ({"Host": host} if host else {}))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_the_address_with_the_token_sets_the_cookie_and_hides_the_token(server):
    address = urllib.parse.urlsplit(server.url)
    status, _, headers = ask(server, f"{address.path}?{address.query}", cookie="")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    for path, location in (("/run?name=a%20b&", "/run?name=a+b"), ("//example.org/?", "/example.org/")):
        assert ask(server, f"{path}{address.query}", cookie="")[2]["Location"] == location
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert ask(server, "/", cookie=cookie)[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "/run?name=run0001", "/chart?name=run0001&kind=loss", "/state?name=run0001", "/x"]
)
@pytest.mark.parametrize("cookie", ["", "ikkuna-1=x", "{name}=wrong", "{name}=", "\x01;;=", "{name}={token}x"])
def test_without_the_token_nothing_is_shown(server, path, cookie):
    status, text, _ = ask(server, path, cookie=cookie.format(name=server.cookie, token=server.token))
    assert status == 403
    assert "run0001" not in text
    assert ask(server, f"{path}{'&' if '?' in path else '?'}token=wrong", cookie="")[0] == 403


@pytest.mark.parametrize(
    "host", ["example.org", "example.org:80", "127.0.0.1.example.org", "localhost.example.org:80", ":80"]
)
def test_another_host_is_refused(server, host):
    status, text, _ = ask(server, "/", host=host)
    assert status == 403
    assert "run0001" not in text


@pytest.mark.parametrize("host", ["localhost", "localhost:6007", "127.0.0.1:1", "[::1]:80"])
def test_the_names_of_this_machine_are_accepted(server, host):
    assert ask(server, "/", host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/run0001/values.1.jsonl", "/..%2fsecret.txt", "//etc/passwd", "/run?name=../secret.txt",
     "/run?name=..%2Foutside", "/run?name=run0002", "/run?name=%2Fetc", "/run?name=run0001%00", "/run?name=", "/run",
     "/chart?name=run0001&kind=x", "/part?name=run0001&part=../x", "/compare?name=run0001"],
)  # fmt: skip
def test_only_runs_of_the_directory_are_shown(server, path):
    status, text, _ = ask(server, path)
    assert status == 404
    assert "a secret" not in text


def test_the_server_listens_on_this_machine_and_is_read_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", method="HEAD")[:2] == (200, "")


def test_pages_forbid_other_sources(server):
    status, text, headers = ask(server, "/run?name=run0001")
    policy = headers["Content-Security-Policy"]
    [nonce] = re.findall(r"script-src 'nonce-([^']+)'", policy)
    assert status == 200
    assert "default-src 'none'" in policy
    assert f'<script nonce="{nonce}">' in text
    assert headers["Referrer-Policy"] == "no-referrer"
    assert nonce not in ask(server, "/run?name=run0001")[1]


def test_runs_are_listed_with_loss_and_findings(server, writer):
    writer.find(Finding("dead_units", "error", "All are 0.", "a", step=3))
    status, text, _ = ask(server, "/")
    assert status == 200
    for shown in ('href="run?name=run0001"', "error: dead_units", "0.05", ">19<", "<polyline", "created (UTC)"):
        assert shown in text
    assert "run0002" not in text


def test_the_directory_is_read_once_for_the_list(server, tmp_path, monkeypatch):
    """With hundreds of runs, reading it for each of them would take minutes."""
    for number in (3, 4, 5):
        (tmp_path / "runs" / f"run000{number}").mkdir()
    calls = []
    monkeypatch.setattr("ikkuna.report.server.find_runs", lambda directory: calls.append(0) or find_runs(directory))
    assert "run0005" in ask(server, "/")[1]
    assert len(calls) == 1


def test_a_run_whose_files_are_deleted_hides_no_other_one(server, writer, tmp_path):
    other = Writer(tmp_path / "runs" / "run0003")
    other.step(0, 4.5)
    other.backend.close()
    assert "4.5" in ask(server, "/")[1]
    for file in writer.directory.glob("*tfevents*"):
        file.unlink()
    status, text, _ = ask(server, "/")
    assert status == 200
    assert "4.5" in text


def test_a_run_that_is_being_written_is_followed(server, writer):
    page = ask(server, "/run?name=run0001")[1]
    assert 'data-follow="state?name=run0001"' in page
    [state] = re.findall(r'data-state="([^"]+)"', page)
    assert ask(server, "/state?name=run0001")[1] == state
    assert "to step 19" in page
    for step in range(20, 30):
        writer.step(step, 7.0)
    writer.find(Finding("loss_spike", "warning", "It jumps.", step=25))
    assert ask(server, "/state?name=run0001")[1] != state
    data = json.loads(ask(server, "/chart?name=run0001&kind=loss")[1])
    assert data["curves"][0]["steps"] == list(range(30))
    assert data["curves"][0]["values"][-1] == 7.0
    assert [mark[0] for mark in data["marks"]] == [25]
    head = ask(server, "/part?name=run0001&part=head")[1]
    assert "to step 29" in head
    assert "It jumps." in head


def test_a_part_of_a_long_curve_is_read_in_full(server, writer):
    for step in range(20, 2020):
        writer.backend.add_scalar(Series("loss"), float(step), step)
        writer.backend.commit(step)
    assert writer.backend.flush(10)
    whole = json.loads(ask(server, "/chart?name=run0001&kind=loss")[1])
    part = json.loads(ask(server, "/chart?name=run0001&kind=loss&from=1000&to=1100")[1])
    assert len(whole["curves"][0]["steps"]) <= 400
    assert part["curves"][0]["steps"] == list(range(999, 1101))


def test_two_runs_are_compared(server, writer, tmp_path):
    other = Writer(tmp_path / "runs" / "run0003")
    for step in range(20):
        other.step(step, 1.0 / (1 + step) + (step > 9))
    other.backend.close()
    other.find(Finding("loss_spike", "warning", "It jumps.", step=10))
    status, text, _ = ask(server, "/compare?name=run0001&name=run0003")
    assert status == 200
    assert "warning: run0003 loss_spike at step 10" in text
    assert "Step 10" in text


def test_the_layers_are_a_part_of_their_own(server):
    assert "data-heatmap=" not in ask(server, "/run?name=run0001")[1]
    part = ask(server, "/part?name=run0001&part=layers")[1]
    assert part.count("data-heatmap=") == 1
    assert "weights_norm2" in part


def test_hostile_names_stay_text(tmp_path):
    name = "run <b>&"
    hostile = Writer(tmp_path / name, JSONLinesBackend, HOSTILE)
    (tmp_path / name / "run.json").write_text("{}")
    hostile.step(0)
    hostile.find(
        Finding("dead_units", "error", HOSTILE, HOSTILE, step=0, class_name=HOSTILE, source=HOSTILE, advice=HOSTILE)
    )
    hostile.backend.close()
    with RunServer(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks at `shutdown`
        thread.start()
        try:
            quoted = urllib.parse.quote(name)
            for path in (
                "/",
                f"/run?name={quoted}",
                f"/part?name={quoted}&part=layers",
                f"/part?name={quoted}&part=head",
            ):
                status, text, _ = ask(server, path)
                assert status == 200, path
                assert "<script>" not in text
                assert "<b>&<" not in text
        finally:
            server.shutdown()
            thread.join()


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        RunServer(tmp_path / "nothing")
