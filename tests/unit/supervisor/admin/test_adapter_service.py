"""What operators are told about adapters before anything is loaded, and where it would go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.config.schema import Config, ModelConfig
from servekit.protocol.adapters import (
    Adapters,
    AdapterSpec,
    AddAdapter,
    GetAdapters,
    RemoveAdapter,
)
from servekit.protocol.messages import Accepted, Refused
from servekit.supervisor.admin.adapter_service import AdapterService
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.deployments.worker_pool import WorkerPool

Make = Callable[..., AdapterService]


def folder(path: Path) -> str:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    return str(path)


@pytest.fixture
def service(tmp_path: Path) -> Make:
    """Fleets without workers: nothing can be loaded, and all that comes before can be seen."""

    def make(*names: str) -> AdapterService:
        filed = {"name": f"{names[0]}-filed", "path": folder(tmp_path / "filed")}
        models = tuple(
            ModelConfig.model_validate(
                {"name": name, "path": "p", "engine": "echo", "aliases": [f"{name}-alias"]}
                | ({"adapters": [filed]} if name == names[0] else {})
            )
            for name in names
        )
        host: Any = SimpleNamespace(publish_change=lambda: None, is_unused=lambda adapter: True)
        pool = cast(WorkerPool, SimpleNamespace(host=host, drain_timeout_s=1.0, gpus=(), run=None))
        plan = SimpleNamespace(config=Config(models=models))
        served = [Deployment(model, pool) for model in models]
        for deployment in served:
            deployment.wanted = True
        return AdapterService(cast(DeploymentManager, SimpleNamespace(served=served, plan=plan)))

    return make


async def refused(service: AdapterService, name: str, path: str, model: str = "") -> str:
    answer = await service.handle_add(AddAdapter(model, AdapterSpec(name, path)))
    assert isinstance(answer, Refused)
    assert answer.invalid, answer
    return answer.message


async def test_what_is_wrong_is_said_before_any_worker_hears_of_it(
    service: Make, tmp_path: Path
) -> None:
    one, two = service("a"), service("a", "b")
    here = folder(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    assert "does not exist" in await refused(one, "x", str(tmp_path / "nowhere"))
    assert "holds no adapter_config.json" in await refused(one, "x", str(tmp_path / "empty"))
    assert "a name begins with" in await refused(one, "x y", here)
    assert "path" in await refused(one, "x", "")
    assert "has to be absolute, not './x'" in await refused(one, "x", "./x")
    for taken in ("a", "a-alias"):
        assert f"the name '{taken}' is taken" in await refused(one, taken, here)
    assert "the name 'a-filed' is taken" in await refused(two, "a-filed", here, "b")
    assert "change it there" not in await refused(two, "b", here, "a")
    assert "name the model of the adapter; there are: a, b" in await refused(two, "x", here)
    assert "no model is called 'c'" in await refused(two, "x", here, "c")


async def test_without_workers_it_is_the_moment_that_is_wrong(
    service: Make, tmp_path: Path
) -> None:
    for desk_, model in ((service("a"), ""), (service("a", "b"), "b-alias")):
        answer = await desk_.handle_add(AddAdapter(model, AdapterSpec("x", folder(tmp_path / "x"))))
        assert isinstance(answer, Refused)
        assert (answer.invalid, answer.retry_after_s) == (False, 5.0)


async def test_to_a_model_that_is_stopped_it_comes_with_that(service: Make, tmp_path: Path) -> None:
    made = service("a")
    made._deployment("a").wanted = False
    answer = await made.handle_add(AddAdapter("", AdapterSpec("x", folder(tmp_path / "x"))))
    assert answer == Accepted("x is loaded with a, which is not there now")
    shown = made.list_adapters(GetAdapters("a"))
    assert isinstance(shown, Adapters)
    assert [(one.name, one.state) for one in shown.adapters["a"]][-1] == ("x", "loading")


async def test_they_are_shown_by_model(service: Make) -> None:
    two = service("a", "b")
    shown = two.list_adapters(GetAdapters())
    assert isinstance(shown, Adapters)
    told = {model: [(o.name, o.state) for o in ones] for model, ones in shown.adapters.items()}
    assert told == {"a": [("a-filed", "loading")], "b": []}
    only = two.list_adapters(GetAdapters("b-alias"))
    assert isinstance(only, Adapters)
    assert set(only.adapters) == {"b"}
    assert isinstance(two.list_adapters(GetAdapters("c")), Refused)


async def test_the_files_comes_back_with_a_reload_and_what_is_not_there_is_said(
    service: Make,
) -> None:
    one = service("a")
    gone = await one.handle_remove(RemoveAdapter("a-filed"))
    assert isinstance(gone, Accepted)
    assert "a reload loads it again" in gone.message
    assert await one.handle_remove(RemoveAdapter("a-filed")) == Refused(
        "The lora adapter 'a-filed' cannot be found.", True
    )
