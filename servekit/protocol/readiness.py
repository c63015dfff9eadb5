"""The rule for readiness: could a request to a model complete? Used by /readyz, `ps`, systemd.

state of the model                                  would a request complete
a worker is ready and can serve                     yes
all ready workers report that they cannot serve     no, although requests are still sent
no worker is ready; it loads at the start           no
… it is loaded by a request, or wakes               yes
… only an operator loads it, or has stopped it      ignored: as if yes
… its last load has failed                          no
"""

from __future__ import annotations

from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.types import ModelStatus


def in_trouble(model: ModelStatus) -> bool:
    """Return whether workers are ready, but all of them report that they cannot serve."""
    ready = [replica for replica in model.replicas if replica.state == "ready"]
    return bool(ready) and all(replica.trouble for replica in ready)


def is_able(model: ModelStatus, *, reached: bool = True) -> bool:
    """Apply the table above; `reached`: the caller can reach a ready worker, if there is one."""
    serves = reached and any(replica.state == "ready" for replica in model.replicas)
    residence = model.residence
    if serves or residence is None:
        return serves and not in_trouble(model)
    at_start = residence.load == "on_start" and residence.tier == "coming"
    return residence.tier in ("stopped", "asleep", "leaving", "coming") and not at_start


def adapter_able(model: ModelStatus, adapter: AdapterStatus) -> bool:
    """Return whether an adapter of a usable model serves, or will be loaded with the model."""
    away = model.residence is not None and model.residence.tier != "resident"
    return adapter.state == "serving" or (away and adapter.state == "loading")
