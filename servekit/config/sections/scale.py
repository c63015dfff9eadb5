"""The number of replicas of a model that scales with its load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from servekit.config.base_model import Section

#: Maximum replicas of one model under one supervisor.
MOST = 256
#: Branch names that pydantic adds to the place of an error; `error_reporting` removes them.
BRANCHES = frozenset({"{min, max}", "number or auto"})


class ReplicaRange(Section):
    """Between how many replicas a model scales."""

    min: Annotated[int, Field(ge=0, le=MOST)] = 1
    """Fewest replicas; 0 only with `load: on_demand`, which starts one as soon as there is a
    request."""
    max: Annotated[int, Field(ge=1, le=MOST)]
    """Most replicas; they are added by load, as long as there is room."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.min > self.max:
            raise ValueError(f"`min`, {self.min}, is more than `max`, {self.max}")
        return self

    @property
    def least(self) -> int:
        """Return the minimum number of replicas while the model is loaded."""
        return max(1, self.min)

    def clamp(self, count: int) -> int:
        """Clamp a number of replicas to the range."""
        return min(max(count, self.least), self.max)


class ScaleConfig(Section):
    """The thresholds at which a model of `replicas: {min, max}` gets a replica more or fewer."""

    wait_s: Annotated[float, Field(gt=0)] = 1.0
    """A replica is added when a request has waited for this long."""
    kv_used: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A replica is also added when this share of the KV caches has been in use for some seconds."""
    down_s: Annotated[float, Field(gt=0)] = 120.0
    """A replica is removed when the others could have carried its load for this long."""


def _branch_of(value: object) -> str:
    is_range = isinstance(value, Mapping | ReplicaRange)
    return "{min, max}" if is_range else "number or auto"


_Number = Annotated[int | Literal["auto"], Field(union_mode="left_to_right")]
Replicas = Annotated[
    Annotated[_Number, Tag("number or auto")] | Annotated[ReplicaRange, Tag("{min, max}")],
    Discriminator(_branch_of),
]
