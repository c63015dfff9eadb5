"""A model's `chat_template`: jinja text in the configuration, or the path of a file.

Text contains a line break or a jinja tag; anything else is a path. A loaded configuration holds the
text, so that a changed file replaces the model's workers.
"""

from __future__ import annotations

from pathlib import Path

from servekit.config.paths import resolve_path
from servekit.model_metadata.chat_template import syntax_error

_TEXT = ("\n", "{{", "{%", "{#")
#: Size limit, as for a configuration file; real templates have some kilobytes.
MAX_BYTES = 2**20


def read_template(text: str, folder: Path) -> str:
    """Return the template's source; raises ValueError with a sentence for the user.

    A path is relative to `folder`. An error in a file names the file and the line; one in inline
    text names the line of the template.
    """
    is_text = any(sign in text for sign in _TEXT)
    path = None if is_text else resolve_path(text, folder)
    source = text if path is None else _read_file(path)
    line, why = syntax_error(source)
    if line:
        where = f"line {line} of the template" if path is None else f"{path}:{line}"
        raise ValueError(f"{where}: {why}")
    return source


def _read_file(path: Path) -> str:
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not a file; write a .jinja file, or the template itself")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{path} is larger than 1 MiB")
        source = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if not source.strip():
        raise ValueError(f"{path} is empty")
    return source
