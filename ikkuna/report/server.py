"""Serves the runs of a directory as pages, on this machine only."""

import hmac
import json
import math
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.errors import ConfigError, IkkunaError
from ikkuna.report.content import RunContent, network_charts
from ikkuna.report.difference import compare_paths, difference_page
from ikkuna.report.modules import kind_tables
from ikkuna.report.page import head_values, layer_values, render, report_page
from ikkuna.store import StoredRun, find_runs
from ikkuna.store.run_directory import read_run_file
from ikkuna.store.sparkline import svg_sparkline
from ikkuna.support.failures import log

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_UNJUDGED = "No findings are stored; `ikkuna check` judges the run."


class _LiveRun:
    """A run that may be written at the same time; `lock` is held while it is read."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.content = RunContent(path.name, StoredRun(path))
        self.content.read_settings()
        self._read_state = self.state
        self._read_findings()

    @property
    def state(self) -> str:
        """A text that changes with the files of values and findings."""
        found = [*self.content.run.path.glob("*tfevents*"), *self.content.run.path.glob("*.jsonl")]
        return str(hash(tuple(sorted((file.name, file.stat().st_size) for file in found))))

    def _read_findings(self) -> None:
        stored = read_findings(self.content.run.path)
        self.content.findings = Findings(note=_UNJUDGED) if stored is None else stored.heard()

    def refresh(self) -> RunContent:
        """Return the content after reading what has been added."""
        if (state := self.state) != self._read_state:
            self._read_state = state
            self.content.run.update()
            self._read_findings()
        return self.content


class RunServer(ThreadingHTTPServer):
    """A read-only server of the runs of a directory, on 127.0.0.1.

    A request needs the token, in its address or in the cookie that the first answer sets, and the name of this machine as its host,
    so that no page of another origin reaches the server.  It never opens a path of a request: a run is one of those of the directory.

    Parameters
    ----------
    directory : str or path-like
        The directory of runs.
    port : int
        The port; 0 for a free one.

    Raises
    ------
    ConfigError
        If there is no such directory.
    OSError
        If the port is in use.

    Examples
    --------
    >>> with RunServer(".", 0) as server:
    ...     server.url.startswith(f"http://127.0.0.1:{server.server_port}/?token=")
    True
    """

    daemon_threads = True

    def __init__(self, directory: str | os.PathLike[str], port: int = 0) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ConfigError(f"'{self.directory}' is not a directory")
        self.token = secrets.token_urlsafe(24)
        self._runs: dict[Path, _LiveRun] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie, which other servers of this machine do not use."""
        return f"ikkuna-{self.server_port}"

    def paths(self) -> dict[str, Path]:
        """Return the runs of the directory by their names; links to other places are left out."""
        root = self.directory.resolve()
        found = {path.name: path for path in find_runs(self.directory) if path.resolve().parent == root}
        if not found and (self.directory / "run.json").is_file():  # the directory is a run itself
            found = {root.name: self.directory}
        return found

    def run(self, name: str) -> _LiveRun:
        """Return a run by its name.

        Raises
        ------
        ConfigError
            If there is no run of this name, or if it has no value.
        """
        paths = self.paths()
        if name not in paths:
            raise ConfigError(f"there is no run {name!r}")
        return self.live_run(paths[name])

    def live_run(self, path: Path) -> _LiveRun:
        """Return the run of a path of `paths`.

        Raises
        ------
        ConfigError
            If it has no value.
        """
        with self._lock:
            if path not in self._runs:
                self._runs[path] = _LiveRun(path)
            return self._runs[path]


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version, sys_version = "ikkuna", ""
    timeout = 60

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)

    def do_GET(self) -> None:
        """Answer a request."""
        host = self.headers.get("Host", "")
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if host.rpartition(":")[0] not in _LOCAL and host not in _LOCAL:
            self._send(HTTPStatus.FORBIDDEN, f"the host {host!r} is not this machine", "text/plain")
        elif not self._is_allowed(query):
            text = "the token is missing or wrong: open the address that `ikkuna ui` has written"
            self._send(HTTPStatus.FORBIDDEN, text, "text/plain")
        elif "token" in query:
            cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            del query["token"]
            # a path of its own: "//host" would lead to another host
            location = f"/{address.path.lstrip('/')}" + (f"?{urlencode(query, doseq=True)}" if query else "")
            self._send(HTTPStatus.SEE_OTHER, "", "text/plain", {"Set-Cookie": cookie, "Location": location})
        else:
            self._answer(address.path, query)

    def do_HEAD(self) -> None:
        """Answer a request without the content."""
        self.do_GET()

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        given = query.get("token", [""])[0]
        if not given:
            try:
                found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            except CookieError:
                found = None
            given = found.value if found is not None else ""
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        views: dict[str, Callable[[dict[str, list[str]], str], tuple[str, str]]] = {
            "/": self._runs_page,
            "/run": self._run_page,
            "/compare": self._compare_page,
            "/chart": self._chart,
            "/part": self._part,
            "/state": self._state,
        }
        nonce = secrets.token_urlsafe(12)
        if path not in views:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page", "text/plain")
            return
        try:
            text, content_type = views[path](query, nonce)
        except IkkunaError as error:
            self._send(HTTPStatus.NOT_FOUND, str(error), "text/plain")
        except (OSError, ValueError) as error:
            log.warning("a page could not be made: %s", error)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "the run could not be read", "text/plain")
        else:
            self._send(HTTPStatus.OK, text, content_type, nonce=nonce)

    def _send(
        self, status: HTTPStatus, text: str, content_type: str, headers: dict[str, str] | None = None, nonce: str = ""
    ) -> None:
        body = text.encode("utf-8", "replace")
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        )
        fixed = {
            "Content-Type": f"{content_type}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        try:
            self.send_response(status)
            for name, value in {**fixed, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:  # the browser has left
            self.close_connection = True

    # -- views ----------------------------------------------------------------------------------------------------

    def _runs_page(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        runs = [_row(name, self.server, path) for name, path in reversed(self.server.paths().items())]
        return render("runs.html", title=f"ikkuna: {self.server.directory}", runs=runs, nonce=nonce), "text/html"

    def _run_page(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        name = _one(query, "name")
        live, quoted = self.server.run(name), quote(name, safe="")
        with live.lock:
            content, state = live.refresh(), live.state
            page = report_page(
                [content],
                nonce=nonce,
                home="./",
                url=f"chart?name={quoted}&kind=",
                part=f"part?name={quoted}&part=",
                follow=f"state?name={quoted}",
                state=state,
            )
        return page, "text/html"

    def _compare_page(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        names = query.get("name", [])
        if len(names) != 2:
            raise ConfigError(f"select two runs to compare, got {len(names)}")
        paths = [self.server.run(name).content.run.path for name in names]
        return difference_page(*compare_paths(paths[0], paths[1]), nonce=nonce, home="./"), "text/html"

    def _chart(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        live, kind = self.server.run(_one(query, "name")), _one(query, "kind")
        within = _number(query, "from", -math.inf), _number(query, "to", math.inf)
        with live.lock:
            charts = network_charts([live.refresh()], kind, within)
        if not charts:
            raise ConfigError(f"the run has no kind {kind!r}")
        return json.dumps(charts[0].data), "application/json"

    def _part(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        live, part = self.server.run(_one(query, "name")), _one(query, "part")
        if part not in ("head", "layers"):
            raise ConfigError(f"there is no part {part!r}")
        with live.lock:
            content = live.refresh()
            values = head_values(content) if part == "head" else layer_values(content, list(kind_tables(content.run)))
            return render("part.html", part=part, run=values), "text/html"

    def _state(self, query: dict[str, list[str]], nonce: str) -> tuple[str, str]:
        return self.server.run(_one(query, "name")).state, "text/plain"


def _one(query: dict[str, list[str]], name: str) -> str:
    if name not in query:
        raise ConfigError(f"the address lacks {name}=")
    return query[name][0]


def _number(query: dict[str, list[str]], name: str, default: float) -> float:
    return float(query[name][0]) if name in query else default


def _row(name: str, server: RunServer, path: Path) -> dict[str, Any]:
    """Return what the list shows of a run."""
    stored = read_run_file(path)
    row = {"name": name, "created": getattr(stored, "created", "")[:19].replace("T", " ")}
    row |= {"last_step": "", "loss": "", "curve": "", "findings": ""}
    with suppress(ConfigError, OSError):  # it has no value yet, or its files are gone
        live = server.live_run(path)
        with live.lock:
            content = live.refresh()
            run = content.run
            row["last_step"] = f"{run.last_step:,}"
            row["findings"] = ", ".join(f"{f.severity}: {f.rule}" for f in content.findings)
            if None in run.names("loss"):
                values = run.series("loss").values
                row |= {"loss": f"{values[-1]:.4g}", "curve": svg_sparkline(values)}
    return row
