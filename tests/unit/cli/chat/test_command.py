"""The slash commands of `servekit chat`, Ollama's among them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from servekit.cli.chat import command
from servekit.cli.chat.command import Talk, read_question, run_command, strip_quotes
from servekit.cli.chat.stream import ChatParameters
from servekit.errors import ConfigError
from tests.unit.cli.instance import invoke


@pytest.fixture
def talk() -> Talk:
    return Talk(httpx.Client(), ChatParameters("a"), "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/set temperature 0.2", "temperature: 0.2"),
        ("/set parameter num_predict 10", "max_tokens: 10"),
        ("/set seed", "seed: the default"),
        ("/set top_p much", "top_p is a number, not 'much'"),
        ("/set temperature nan", "temperature is a number, not 'nan'"),
        ("/set mirostat 1", "/set knows system, verbose, quiet, temperature"),
        ("/set system You are terse.", "new chat"),
        ("/load b", "b: new chat"),
        ("/?", "/bye, /exit"),
        ("/unknown", "there is no /unknown"),
    ],
)
def test_commands_answer(
    talk: Talk, capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    assert run_command(talk, typed)
    assert said in capsys.readouterr().out


def test_a_piped_question_has_no_end_of_line() -> None:
    assert read_question(b"Which city?\n") == "Which city?"
    assert read_question(b"  a\r\n\nb\r\n\n") == "  a\n\nb"
    with pytest.raises(ConfigError, match="the input is empty"):
        read_question(b" \n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0xe4\)"):
        read_question("ähm".encode("latin-1"))


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\u00e4"])
def test_a_key_that_no_header_can_have_is_told_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SERVEKIT_API_KEY", key)
    done = invoke("chat", "--url", "http://127.0.0.1:1/v1")
    said = "the key in SERVEKIT_API_KEY has characters that no key can have\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_show_has_what_was_set(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ("/set temperature 0.2", '/set system """You\nare."""', "/load b", "/show"):
        run_command(talk, typed)
    shown = capsys.readouterr().out
    for line in ("model        b", "system       You\nare.", "temperature  0.2"):
        assert line in shown


def test_text_between_quotes_is_taken_without_them() -> None:
    assert strip_quotes('"""a\nb"""') == "a\nb"
    assert strip_quotes('say """') == 'say """'
    assert strip_quotes('""""') == '""""'


def test_a_user_without_a_home_talks_without_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    with command._keep_history():
        pass
    assert list(tmp_path.iterdir()) == []
