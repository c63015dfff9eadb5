"""The plan of an instance: its configuration, checked, with a place for each worker."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servekit.config.engines.installed import Machine
from servekit.config.engines.selection import EngineChoice
from servekit.config.load import error_at, load_here
from servekit.config.schema import Config, ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.errors import ConfigError, did_you_mean
from servekit.protocol.messages import AccessRules
from servekit.supervisor import access_rules as access
from servekit.supervisor.scheduling import memory_estimator as estimates
from servekit.supervisor.scheduling.memory_estimator import Estimate
from servekit.supervisor.scheduling.memory_requests import (
    Assignment,
    Misplaced,
    check_host_memory,
)
from servekit.supervisor.scheduling.placement import place, placed_elsewhere
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu, Slot

#: A file that was changed this recently may be half written; and the longest wait for it.
_AT_REST_S = 0.5
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Source:
    """The configuration's source: a file, and the command line's settings, which override it."""

    path: Path
    server: Mapping[str, object] = field(default_factory=dict)
    insecure: bool = False  # serve without keys to everybody who reaches the port
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # holds keys
    profile: str = ""  # the profile in force; "": all models are served
    asked_profile: str = ""  # the profile of the command line
    reloads: bool = False  # the instance runs already, with the profile

    def plan(
        self,
        gpus: Sequence[Gpu],
        held: Mapping[str, Sequence[Slot]] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> Plan:
        """Read and check the file; return its plan.

        `held` are the GPUs that models have now and should keep. `counts` are the present replica
        counts of models with a range, which are kept if everything fits. Raises ConfigError with
        everything that is wrong with the file.
        """
        config, choices = load_here(self.path, Machine(bool(gpus), environ=self.environ))
        server = config.server.model_copy(update=dict(self.server))
        models = self._apply_profile(config)
        config = config.model_copy(update={"server": server, "models": models})
        if not self.insecure and (reason := access.refuse_public(config)):
            raise error_at(self.path, ("server", "host"), f"{reason}.")
        try:
            rules = access.rules(config, self.environ)
            access.check_handed(config, self.environ)
        except access.KeyMissing as error:
            raise error_at(self.path, error.at, str(error)) from None
        name = str(self.path.resolve())
        served = self._served(config)
        if config.launcher == "ray":
            cpus = (config.ray or RayConfig()).cpus
            away = placed_elsewhere(served, max(1, int(cpus)))
            return Plan(config, name, away, (), self, rules, choices=choices)
        try:
            places = self._places(config, gpus, held or {}, counts or {})
            found = self._estimates(config, places)
        except Misplaced as error:
            index = [config.models.index(served[int(at)]) for at in error.loc[1:2]]
            loc = (*error.loc[:1], *index, *error.loc[2:])
            raise error_at(self.path, loc, error.message) from None
        return Plan(config, name, places, tuple(gpus), self, rules, found, choices)

    def _served(self, config: Config) -> tuple[ModelConfig, ...]:
        """Return the models that the profile does not leave out; only these get a place."""
        if not self.profile:
            return config.models
        names = config.profiles[self.profile]
        return tuple(model for model in config.models if model.name in names)

    def _apply_profile(self, config: Config) -> tuple[ModelConfig, ...]:
        """Return the models; those that the profile leaves out are loaded by no request."""
        if not self.profile:
            return config.models
        if self.profile not in config.profiles:
            there = ", ".join(config.profiles) or "none"
            if self.reloads:
                raise ConfigError(
                    f"{self.path}: the profile {self.profile!r}, which is in force, is not in the"
                    " file; bring it back, or switch with `servekit profile` to another (there are:"
                    f" {there}) or to all"
                )
            hint = did_you_mean(self.profile, config.profiles)
            raise ConfigError(
                f"{self.path}: no profile is called {self.profile!r}; there are: {there}{hint}"
            )
        served = config.profiles[self.profile]
        return tuple(
            model if model.name in served else model.model_copy(update={"load": "manual"})
            for model in config.models
        )

    def _places(
        self,
        config: Config,
        gpus: Sequence[Gpu],
        held: Mapping[str, Sequence[Slot]],
        counts: Mapping[str, int],
    ) -> tuple[Assignment, ...]:
        """Return the places. Raises Misplaced.

        Models give up scaled-up replicas if the configuration does not fit with them.
        """
        cpus, models = cgroup.count_usable_cpus(), self._served(config)
        try:
            places = place(models, gpus, cpus, held, config.gpus.reserve, counts)
            check_host_memory(models, places, cgroup.total_memory_bytes())
        except Misplaced:
            if not counts:
                raise
            return self._places(config, gpus, held, {})
        return places

    def _estimates(self, config: Config, places: Sequence[Assignment]) -> dict[str, Estimate]:
        """Return the memory estimate of each model at its first place. Raises Misplaced."""
        found: dict[str, Estimate] = {}
        for index, model in enumerate(self._served(config)):
            own = [place for place in places if place.model == model.name]
            one = estimates.estimate(model, own[0], self.environ)
            if one is not None:
                found[model.name] = one
                for place in own:
                    estimates.check_weights_fit(index, model, place, one, config.gpus.reserve)
        return found

    def await_rest(self) -> None:
        """Block until nobody has written to the file for a moment; call it in a thread.

        Half a file may well be a valid one with fewer models. Raises ConfigError.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while (age_s := self._age_s()) < _AT_REST_S:
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.path}: is still being written; try again when it is done")
            time.sleep(min(_LOOK_EVERY_S, _AT_REST_S - max(0.0, age_s)))

    def _age_s(self) -> float:
        try:
            age_s = time.time() - self.path.stat().st_mtime
        except OSError:
            return _AT_REST_S  # reading it will report the error
        return age_s if age_s >= 0 else _AT_REST_S  # negative: the clock was set back


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration to run, and the place of each worker."""

    config: Config
    config_path: str
    places: tuple[Assignment, ...]
    gpus: tuple[Gpu, ...]
    source: Source
    access: AccessRules
    estimates: Mapping[str, Estimate] = field(default_factory=dict)  # of models with files
    choices: Mapping[str, EngineChoice] = field(
        default_factory=dict
    )  # of models with `engine: auto`

    def left_out_by(self, model: str) -> str:
        """Return the profile in force if the model is not in it, else ""."""
        profile = self.source.profile
        return profile if profile and model not in self.config.profiles[profile] else ""
