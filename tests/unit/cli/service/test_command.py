"""The systemd unit that `servekit service install` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli.service import command
from servekit.cli.service.command import install, write_unit
from servekit.errors import ConfigError, StartError

ROOT = Path(__file__).parents[4]


def test_the_systems_unit_is_deploys_with_other_paths() -> None:
    text = write_unit(Path("/srv/my models/a.yaml"), Path("/opt/sk/bin/servekit"), user=False)
    deployed = (ROOT / "deploy" / "systemd" / "servekit.service").read_text()
    lines = deployed[deployed.index("[Unit]") :].splitlines()
    differ = [one for one in text.splitlines()[2:] if one not in lines]
    assert differ == [
        'ExecStart=/opt/sk/bin/servekit up --config "/srv/my models/a.yaml"'
        " --run-dir /var/lib/servekit/run",
        "ExecReload=/opt/sk/bin/servekit reload --run-dir /var/lib/servekit/run",
    ]


def test_a_users_unit_has_no_sandbox_and_the_default_run_directory() -> None:
    text = write_unit(Path("/home/u/a.yaml"), Path("/home/u/.venv/bin/servekit"), user=True)
    assert "ExecStart=/home/u/.venv/bin/servekit up --config /home/u/a.yaml\n" in text
    assert "WantedBy=default.target" in text
    assert not [word for word in ("DynamicUser", "Protect", "/var/lib", "network") if word in text]


def test_a_users_unit_reloads_the_instance_of_the_files_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("models: [{name: a, path: a, engine: echo}]\n")
    install(config, user=True, output=Path("-"))
    assert "/servekit reload\n" in capsys.readouterr().out
    config.write_text("models: [{name: a, path: a, engine: echo}]\nrun_dir: my run\n")
    install(config, user=True, output=Path("-"))
    assert f'/servekit reload --run-dir "{tmp_path}/my run"\n' in capsys.readouterr().out


def test_a_unit_serves_a_profile_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("models: [{name: a, path: a, engine: echo}]\nprofiles: {evening: [a]}\n")
    install(config, user=True, output=Path("-"), profile="evening")
    assert f"up --config {config} --profile evening\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no profile is called 'morning'; there are: evening"):
        install(config, user=True, output=Path("-"), profile="morning")


def test_the_systems_unit_cannot_read_homes() -> None:
    with pytest.raises(ConfigError, match="--user"):
        write_unit(Path("/home/u/a.yaml"), Path("/opt/sk/bin/servekit"), user=False)


def test_the_systems_unit_cannot_read_what_a_link_leads_to(tmp_path: Path) -> None:
    here = Path("/tmp/no-such-folder")
    with pytest.raises(ConfigError, match=r"^/tmp/no-such-folder/a.yaml: .* temporary folders"):
        write_unit(here / "a.yaml", Path("/opt/sk/bin/servekit"), user=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_HIDDEN", (f"{tmp_path}/home/",))
        program = tmp_path / "opt" / "servekit"
        program.parent.mkdir()
        (tmp_path / "opt" / "python").symlink_to(tmp_path / "home" / "python3.11")
        with pytest.raises(ConfigError, match=r"/home/python3\.11: the system's unit cannot read"):
            write_unit(Path("/srv/a.yaml"), program, user=False)


def test_advice_is_not_what_was_tried(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("models: [{name: a, path: a, engine: echo}]\n")
    with pytest.raises(StartError, match=r"cannot write .*/u: File exists$"):
        install(config, user=True, output=config / "u")
