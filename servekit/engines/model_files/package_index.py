"""Wheels of package indexes: listing and download with the user's own settings.

The settings are those of pip (its environment variables and files) and, where pip has none, uv's.
Indexes are queried by the simple API: JSON if supported, otherwise HTML.

Source: PEP 503, 629, 691, 592; https://pip.pypa.io/en/stable/topics/configuration/;
https://docs.astral.sh/uv/reference/environment/.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import json
import os
import re
import shutil
import ssl
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

import httpx
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from servekit.errors import LoadError

_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, "
    "text/html;q=0.01"
)
_TIMEOUT_S = 15.0
#: Minimum read timeout; many mirrors query another index first.
_READ_TIMEOUT_S = 30.0
#: Strongest first; an index may provide several.
_HASHES = ("sha512", "sha384", "sha256", "sha224", "sha1", "md5")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
#: Packages of the interpreter that a virtual environment was made from.
_BASE_PACKAGES = tuple(
    Path(sysconfig.get_path("purelib", scheme, vars={"base": sys.base_prefix}))
    for scheme in ("posix_prefix", "posix_local", "deb_system")
    if scheme in sysconfig.get_scheme_names()
)
#: Errors from a page that is none of an index's, or a hostile one.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
#: Callback for progress: bytes done, and bytes in total (0: unknown).
Report = Callable[[int, int], None]


def default_index() -> str:
    """Return pip's default index; "" if there is no pip on this machine.

    Source: models/index.py of the installed pip, of the base interpreter's, or of a wheel that
    `ensurepip` would install.
    """
    for text in _read_pip_sources():
        if found := re.search(r'^PyPI = PackageIndex\(\s*"(https://[^"]+)"', text, re.MULTILINE):
            return f"{found[1].rstrip('/')}/simple"
    return ""


def _read_pip_sources() -> Iterator[str]:
    """Yield the text of each pip's module about its default index."""
    module = "pip/_internal/models/index.py"
    pip, bundle = find_spec("pip"), find_spec("ensurepip")
    installed = [Path(pip.origin).parents[1]] if pip and pip.origin else []
    for folder in (*installed, *_BASE_PACKAGES):
        with contextlib.suppress(OSError):
            yield (folder / module).read_text()
    bundled = [Path(bundle.origin).parent / "_bundled"] if bundle and bundle.origin else []
    # distributions without bundled wheels have them in a folder of their own
    shared = sysconfig.get_config_var("WHEEL_PKG_DIR")
    for folder in (*bundled, *([Path(shared)] if shared else [])):
        for wheel in sorted(folder.glob("pip-*.whl")):
            with contextlib.suppress(OSError, KeyError, zipfile.BadZipFile):
                yield zipfile.ZipFile(wheel).read(module).decode()


@dataclass(frozen=True, slots=True)
class Settings:
    """The package indexes and the network settings for them."""

    indexes: tuple[str, ...]
    no_index: bool = False  # the user wants none
    find_links: tuple[str, ...] = ()
    trusted: frozenset[str] = frozenset()  # HOST or HOST:PORT
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout_s: float = _TIMEOUT_S
    read_timeout_s: float = _READ_TIMEOUT_S
    retries: int = 3

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of this user."""
        told = _read_pip_options(environ)

        def words(*names: str) -> tuple[str, ...]:
            return tuple(word for name in names for word in told.get(name, "").split())

        uv = environ.get
        index = told.get("index_url") or uv("UV_DEFAULT_INDEX") or uv("UV_INDEX_URL")
        index = index or default_index()
        extra = [*words("extra_index_url"), *uv("UV_EXTRA_INDEX_URL", "").split()]
        extra += uv("UV_INDEX", "").split()
        timeout_s = _parse_number(told.get("timeout") or told.get("default_timeout"), _TIMEOUT_S)
        offline = told.get("no_index", "").lower() in ("1", "true", "yes", "on", "t", "y")
        named = [_strip_index_name(url) for url in (index, *extra) if url]
        links = (*words("find_links"), *uv("UV_FIND_LINKS", "").replace(",", " ").split())
        hosts = (*words("trusted_host"), *uv("UV_INSECURE_HOST", "").replace(",", " ").split())
        bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE")
        return cls(
            indexes=() if offline else tuple(dict.fromkeys(named)),
            no_index=offline,
            find_links=links,
            trusted=frozenset(hosts),
            cert=told.get("cert") or bundle or None,
            client_cert=told.get("client_cert") or None,
            proxy=told.get("proxy") or None,
            timeout_s=timeout_s,
            read_timeout_s=max(timeout_s, _READ_TIMEOUT_S),
            retries=int(_parse_number(told.get("retries"), 3)),
        )


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel file of an index or a folder."""

    filename: str
    url: str  # with the credentials of its index
    hashes: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0  # 0: unknown
    requires_python: str = ""


class NoSuchWheel(LoadError):
    """The indexes have all answered, and none has that version."""


def find_wheel(requirement: str, settings: Settings) -> Wheel:
    """Return the best wheel of NAME==VERSION for this interpreter.

    Raises LoadError: permanent if all indexes have answered and none has it.
    """
    name, _, wanted = requirement.partition("==")
    there: list[Wheel] = []
    unreached: list[str] = []
    refused: list[str] = []
    for source in (*settings.find_links, *settings.indexes):
        page = source
        if source not in settings.find_links:
            page = f"{source.rstrip('/')}/{canonicalize_name(name)}/"
        try:
            there += _list_wheels(page, settings, is_index=source in settings.indexes)
        except (httpx.HTTPStatusError, httpx.TooManyRedirects, _Refused) as error:
            refused.append(_describe_failure(error))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, *_MALFORMED) as error:
            unreached.append(f"{without_credentials(page)}: {_describe_failure(error)}")
    of_it = [wheel for wheel in there if _is_named(wheel, name)]
    fitting = [(rank, wheel) for wheel in of_it if (rank := _rank_wheel(wheel, wanted)) is not None]
    if fitting:
        return min(fitting, key=lambda one: one[0])[1]
    if unreached:
        told = "; ".join(unreached)
        raise LoadError(
            f"The package index cannot be reached for {requirement}: {told}", permanent=False
        )
    said = _explain_missing(requirement, of_it, wanted, settings, refused)
    raise NoSuchWheel(said) if settings.indexes and not refused else LoadError(said)


def find_wheel_bytes(wheel: Wheel, settings: Settings) -> int:
    """Return the size of the file, by a HEAD request if the index does not tell it; 0: unknown."""
    if wheel.size_bytes:
        return wheel.size_bytes
    try:
        if urlsplit(wheel.url).scheme in ("", "file"):
            return _local_path(wheel.url).stat().st_size
        with _make_client(wheel.url, settings) as client:
            answer = client.head(wheel.url, headers={"Accept-Encoding": "identity"})
            answer.raise_for_status()
            return int(answer.headers.get("content-length") or 0)
    except (httpx.HTTPError, httpx.InvalidURL, _Refused, ValueError, OSError):
        return 0


def download_wheel(wheel: Wheel, path: Path, settings: Settings, report: Report) -> None:
    """Download the wheel to `path` and verify it. Raises LoadError, and OSError of the disk.

    An interrupted download is resumed. `report` gets the bytes done and in total (0: unknown).
    """
    parts = urlsplit(wheel.url)
    if parts.scheme in ("", "file"):
        file = _local_path(wheel.url)
        if not file.is_file():  # a device or a FIFO would have no end
            raise LoadError(f"{wheel.filename} cannot be fetched: {file} is no file")
        shutil.copyfile(file, path)
    else:
        try:
            client = _make_client(wheel.url, settings)
        except (_Refused, ValueError) as error:
            raise LoadError(f"{wheel.filename} cannot be fetched: {error}") from error
        with client:
            _fetch_file(client, wheel, path, settings, report)
    _check_hash(wheel, path)


def without_credentials(url: str) -> str:
    """Return the URL without credentials, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


# ---- settings


def _read_pip_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's options, their names with underscores; the environment overrides the files."""
    found: dict[str, str] = {}
    for path in _pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip itself reports what is wrong with it
        for section in ("global", "download"):
            if parser.has_section(section):
                found |= {key.replace("-", "_"): text for key, text in parser.items(section)}
    for key, text in environ.items():
        if key.startswith("PIP_") and (text or key in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")):
            found[key.removeprefix("PIP_").lower()] = text
    return found


def _pip_files(environ: Mapping[str, str]) -> list[Path]:
    """Return pip's configuration files; later files override earlier ones."""
    given = environ.get("PIP_CONFIG_FILE", "")
    if given == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    shared = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    own = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return [
        *(Path(folder) / "pip/pip.conf" for folder in reversed(shared.split(":")) if folder),
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        own / "pip/pip.conf",
        Path(sys.prefix) / "pip.conf",
        *([Path(given)] if given else []),
    ]


def _strip_index_name(url: str) -> str:
    """Return the URL of a uv index, which may be written NAME=URL."""
    name, found, rest = url.partition("=")
    return rest if found and "/" not in name and ":" not in name else url


def _parse_number(text: str | None, otherwise: float) -> float:
    try:
        return float(text) if text else otherwise
    except ValueError:
        return otherwise


# ---- what there is


class _Refused(Exception):
    """The request is not sent, for the reason in the message."""


def _list_wheels(page: str, settings: Settings, *, is_index: bool) -> list[Wheel]:
    """Return all wheels of a page or folder; empty if it does not exist."""
    parts = urlsplit(page)
    if parts.scheme in ("", "file"):
        folder = _local_path(page)
        if is_index or folder.suffix in (".html", ".htm"):
            file = folder / "index.html" if folder.is_dir() else folder
            return _of_html(file.read_text(), file.as_uri()) if file.is_file() else []
        here = sorted(folder.glob("*.whl")) if folder.is_dir() else [folder]
        return [Wheel(file.name, file.as_uri()) for file in here if file.suffix == ".whl"]
    with _make_client(page, settings) as client:
        answer = _get_page(client, page, settings.retries)
    if answer.status_code in (404, 410):
        return []
    answer.raise_for_status()
    base = str(answer.url)
    if "json" in answer.headers.get("content-type", ""):
        found = _of_json(json.loads(answer.content), base)
    else:
        found = _of_html(answer.text, base)
    return [replace(wheel, url=_with_credentials(wheel.url, page)) for wheel in found]


def _get_page(client: httpx.Client, page: str, retries: int) -> httpx.Response:
    """Get a page, with retries for temporary errors. Raises httpx.HTTPError."""
    for left in range(max(retries, 0), -1, -1):
        try:
            answer = client.get(page, headers={"Accept": _ACCEPT})
            if answer.status_code < 500 and answer.status_code != 429:
                return answer
            if not left:
                kind = f"{answer.status_code} {answer.reason_phrase}"
                raise httpx.RemoteProtocolError(f"it answers {kind}", request=answer.request)
        except httpx.TransportError:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def _of_json(page: object, base: str) -> list[Wheel]:
    files = page.get("files") if isinstance(page, dict) else None
    if not isinstance(files, list):
        raise ValueError("its answer is not a page of the simple API")
    return [
        Wheel(
            filename=str(one["filename"]),
            url=urljoin(base, str(one["url"])),
            hashes={str(k): str(v) for k, v in (one.get("hashes") or {}).items()},
            size_bytes=int(one.get("size") or 0),
            requires_python=str(one.get("requires-python") or ""),
        )
        for one in files
        if isinstance(one, dict) and str(one.get("filename", "")).endswith(".whl")
    ]


def _of_html(text: str, base: str) -> list[Wheel]:
    parser = _Anchors(base)
    parser.feed(text)
    found = []
    for attributes in parser.anchors:
        url, fragment = urldefrag(urljoin(parser.base, attributes["href"]))
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        kind, _, digest = fragment.partition("&")[0].partition("=")
        if name.endswith(".whl"):
            hashes = {kind: digest} if kind in _HASHES else {}
            requires = attributes.get("data-requires-python", "")
            found.append(Wheel(name, url, hashes, requires_python=requires))
    return found


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.anchors: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        if tag == "base" and attributes.get("href"):
            self.base = urljoin(self.base, attributes["href"])
        elif tag == "a" and attributes.get("href"):
            self.anchors.append(attributes)


def _is_named(wheel: Wheel, name: str) -> bool:
    try:
        return parse_wheel_filename(wheel.filename)[0] == canonicalize_name(name)
    except (InvalidWheelFilename, InvalidVersion):
        return False


def _rank_wheel(wheel: Wheel, wanted: str) -> tuple[int, tuple[int, str]] | None:
    """Return a sort key, lowest is best; None for another version or an incompatible wheel."""
    _, version, build, tags = parse_wheel_filename(wheel.filename)
    try:
        python = SpecifierSet(wheel.requires_python)
        if version != Version(wanted) or not python.contains(_python_version(), prereleases=True):
            return None
    except (InvalidVersion, InvalidSpecifier):
        return None
    ranks = [rank for rank, tag in enumerate(sys_tags()) if tag in tags]
    newest = (-build[0], build[1]) if build else (0, "")
    return (ranks[0], newest) if ranks else None


def _python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _explain_missing(
    requirement: str, there: list[Wheel], wanted: str, settings: Settings, refused: list[str]
) -> str:
    versions = sorted({parse_wheel_filename(wheel.filename)[1] for wheel in there})
    asked = ", ".join(without_credentials(url) for url in (*settings.indexes, *settings.find_links))
    if refused:
        return f"{requirement} cannot be fetched: {'; '.join(refused)}"
    if not asked and settings.no_index:
        return f"{requirement} cannot be fetched: PIP_NO_INDEX is set, and PIP_FIND_LINKS is not."
    if not asked:
        return (
            f"{requirement} cannot be fetched: no package index is known, as there is no pip here "
            "whose default could be taken. Set PIP_INDEX_URL or UV_DEFAULT_INDEX to the simple API "
            "of your index (its URL usually ends in /simple), or install pip: `uv pip install pip`."
        )
    if any(str(version) == wanted for version in versions):
        return (
            f"{requirement} has no wheel for Python {_python_version()} on this machine at {asked}."
        )
    shown = ", ".join(map(str, versions[-12:]))
    has = f"it has {shown}" if versions else f"it has no wheel of {requirement.partition('==')[0]}"
    return f"The package index has no {requirement}: {has} ({asked})."


# ---- how it is reached


def _make_client(url: str, settings: Settings) -> httpx.Client:
    """Create a client for the URL's host. Raises _Refused, or ValueError for invalid settings."""
    _require_encryption(url, settings)

    def check_redirect(request: httpx.Request) -> None:
        try:
            _require_encryption(str(request.url), settings)
        except _Refused as error:
            raise httpx.UnsupportedProtocol(str(error), request=request) from None

    try:
        return httpx.Client(
            auth=None if urlsplit(url).username else _netrc_auth(),
            verify=_tls_verification(settings, trusted=_is_trusted(url, settings)),
            event_hooks={"request": [check_redirect]},
            proxy=settings.proxy,
            timeout=httpx.Timeout(settings.timeout_s, read=settings.read_timeout_s),
            follow_redirects=True,
            headers={"User-Agent": "servekit"},
        )
    except ImportError as error:  # a SOCKS proxy
        raise ValueError(f"the proxy needs a package that is not installed: {error}") from None


def _require_encryption(url: str, settings: Settings) -> None:
    host = urlsplit(url).hostname or ""
    if urlsplit(url).scheme == "http" and not _is_trusted(url, settings) and host not in _LOOPBACK:
        raise _Refused(
            f"{without_credentials(url)} is not encrypted; use https, or name {host} in "
            "PIP_TRUSTED_HOST"
        )


def _is_trusted(url: str, settings: Settings) -> bool:
    parts = urlsplit(url)
    return bool({parts.hostname or "", f"{parts.hostname}:{parts.port}"} & settings.trusted)


def _netrc_auth() -> httpx.Auth | None:
    try:
        return httpx.NetRCAuth(os.environ.get("NETRC"))
    except (OSError, SyntaxError):  # no file, or not a readable one
        return None


def _tls_verification(settings: Settings, *, trusted: bool) -> ssl.SSLContext | bool:
    if trusted:
        return False
    if settings.cert is None and settings.client_cert is None:
        return True
    folder = settings.cert if settings.cert and Path(settings.cert).is_dir() else None
    file = settings.cert if not folder else None
    context = ssl.create_default_context(cafile=file, capath=folder)
    if settings.client_cert:
        context.load_cert_chain(settings.client_cert)
    return context


def _with_credentials(url: str, page: str) -> str:
    """Add the index's credentials to a URL of the same host."""
    own, of_page = urlsplit(url), urlsplit(page)
    user, found, _ = of_page.netloc.rpartition("@")
    same = (own.scheme, own.hostname, own.port) == (of_page.scheme, of_page.hostname, of_page.port)
    if not found or own.username or not same:
        return url
    return urlunsplit(own._replace(netloc=f"{user}@{own.netloc}"))


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else Path(url).expanduser()


# ---- the file


def _fetch_file(
    client: httpx.Client, wheel: Wheel, path: Path, settings: Settings, report: Report
) -> None:
    last: httpx.HTTPError | None = None
    path.touch()
    left = max(settings.retries, 0)
    while left >= 0:
        before = path.stat().st_size
        try:
            _fetch_rest(client, wheel, path, report)
            return
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise LoadError(
                    f"{wheel.filename} cannot be fetched: {_describe_failure(error)}"
                ) from error
            last = error
        except httpx.HTTPError as error:
            last = error
        if not 0 < before < path.stat().st_size:  # a large file may break off again and again
            left -= 1
    assert last is not None
    raise LoadError(
        f"The package index cannot be reached for {wheel.filename}: {_describe_failure(last)}",
        permanent=False,
    ) from last


def _fetch_rest(client: httpx.Client, wheel: Wheel, path: Path, report: Report) -> None:
    """Resume the download at the end of `path`. Raises httpx.HTTPError."""
    done = path.stat().st_size
    headers = {"Accept-Encoding": "identity"}  # the hash is of the unencoded bytes
    if done:
        headers["Range"] = f"bytes={done}-"
    with client.stream("GET", wheel.url, headers=headers) as answer:
        if done and answer.status_code == 416:  # nothing is left, or the file has changed
            path.write_bytes(b"")
            raise httpx.RemoteProtocolError("the rest cannot be fetched", request=answer.request)
        answer.raise_for_status()
        if done and answer.status_code != 206:
            done = 0  # the server sends the whole file again
        total = done + int(answer.headers.get("content-length") or 0)
        with path.open("r+b", buffering=0) as file:
            file.truncate(done)
            file.seek(done)
            for piece in answer.iter_raw():  # raw, so that an interruption loses no bytes
                _write_all(file.fileno(), piece)
                done += len(piece)
                report(done, total if total > done else max(total, wheel.size_bytes))


def _write_all(fd: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _check_hash(wheel: Wheel, path: Path) -> None:
    """Raise LoadError if the file's hash is not the index's."""
    kind = next((one for one in _HASHES if one in wheel.hashes), None)
    if kind is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if found != wheel.hashes[kind].lower():
        raise LoadError(
            f"{wheel.filename} does not match its index: its {kind} is {found}, and "
            f"{wheel.hashes[kind]} was expected.",
            permanent=False,
        )


def _describe_failure(error: Exception) -> str:
    """Return an error's message, without credentials."""
    if isinstance(error, httpx.HTTPStatusError):
        code, url = error.response.status_code, without_credentials(str(error.request.url))
        advice = (
            "; give a name and a password in the URL of the index or in ~/.netrc"
            if code in (401, 403)
            else ""
        )
        return f"{url} answers {code} {error.response.reason_phrase}{advice}"
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return re.sub(r"//[^/\s]*@", "//", str(error)) or type(error).__name__
