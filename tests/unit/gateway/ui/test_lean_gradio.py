"""The start of Gradio in a gateway; its import in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from servekit.gateway.ui.lean_gradio import build_without_apps

CODE = """
import ast, inspect
from servekit.gateway.ui.lean_gradio import import_gradio
find_file = inspect.getfile
del ast.get_source_segment  # stubs are made of what it returns
import_gradio()
import gradio
assert inspect.getfile is find_file
assert inspect.getfile(gradio.Textbox).endswith("textbox.py")
print([str(event) for event in gradio.Textbox.EVENTS][:2])
"""


def test_no_stub_is_written_and_components_have_their_events() -> None:
    command = [sys.executable, "-c", CODE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "['change', 'input']\n"), run.stderr


def test_pages_build_no_applications_of_their_own() -> None:
    import gradio

    made = gradio.routes.App
    with build_without_apps(), gradio.Blocks() as blocks:
        pass
    assert blocks.app is None
    assert isinstance(blocks.queue().app, made)
