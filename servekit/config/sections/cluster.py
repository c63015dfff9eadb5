"""The Ray section of the configuration file: the cluster in which workers are placed."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from servekit.config.base_model import Section, require_form

_NAMESPACE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_OF_NAMESPACE = "letters, digits, ., _ and -, 64 characters at most, a letter or digit first"


def _address(value: str) -> str:
    if value == "auto":
        return value
    host, colon, port = value.rpartition(":")
    if "://" in value or not (host and colon and re.fullmatch(r"[0-9]{1,5}", port)):
        raise ValueError(
            "must be HOST:PORT of the cluster's head, as `ray start` prints it, or auto; ray://"
            " is not supported, since servekit runs on a node of the cluster"
        )
    return value


class RayConfig(Section):
    """The Ray cluster of `launcher: ray`."""

    address: Annotated[str, AfterValidator(_address)] = "auto"
    """HOST:PORT of its head; auto: the cluster that this machine is a node of, or RAY_ADDRESS."""
    namespace: Annotated[str | None, require_form(_NAMESPACE, _OF_NAMESPACE)] = None
    """Ray's namespace for the actors of this instance; by default one made of this machine's name
    and the run directory."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Where the replicas of a model go: PACK uses as few nodes as possible, SPREAD as many. One
    replica is always on one node, however many GPUs it has."""
    cpus: Annotated[float, Field(gt=0, le=1024)] = 1.0
    """CPUs that each worker claims of its node; for a worker on a CPU also its number of
    threads."""
    gateways: Literal["here", "every_node"] = "here"
    """Where clients can connect: on the supervisor's node only, or on every node of the cluster,
    where then one more gateway listens on `server.port`."""
    grace_s: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """How long workers and gateways serve on after the supervisor is gone, so that the next one can
    adopt them; then they end."""
    autoscaled: bool = False
    """The cluster grows on demand: a worker that fits on no present node waits for a new one,
    instead of making the file invalid. `device: auto` is a GPU if the cluster has one now."""
    connect_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """Longest time to join the cluster and to check its nodes."""
    certificate_life_s: Annotated[float, Field(ge=10, le=10_000_000)] = 30 * 86400.0
    """Lifetime of the certificates by which workers, gateways and the supervisor know each other.
    Each is renewed after two thirds of it; clocks may differ by a third of it, by 5 minutes at
    most."""

    @model_validator(mode="after")
    def _certificates_outlive_the_supervisor(self) -> RayConfig:
        if self.certificate_life_s < 3 * self.grace_s:
            raise ValueError(
                f"certificate_life_s has to be {3 * self.grace_s:g} or more, thrice grace_s:"
                " certificates are not renewed while there is no supervisor"
            )
        return self
