"""Whether a request to a model could complete: what /readyz, `ps --ready` and systemd are told.

how it stands                                       would a request complete
a worker is ready, and says that it can serve       yes
all that are ready say that they cannot             no, although they are asked all the same
none is ready; it is to be there from the start     no
… it comes when it is asked for, or wakes           yes
… only an operator loads it, or has stopped it      it is left out: as if yes
… its last load has failed                          no
"""

from __future__ import annotations

from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.types import ModelStatus


def in_trouble(model: ModelStatus) -> bool:
    """All that are ready say that they cannot serve now."""
    ready = [replica for replica in model.replicas if replica.state == "ready"]
    return bool(ready) and all(replica.trouble for replica in ready)


def able(model: ModelStatus, *, reached: bool = True) -> bool:
    """By the table above; `reached`: who asks can reach a worker that is ready, if there is one."""
    serves = reached and any(replica.state == "ready" for replica in model.replicas)
    residence = model.residence
    if serves or residence is None:
        return serves and not in_trouble(model)
    at_start = residence.load == "on_start" and residence.tier == "coming"
    return residence.tier in ("stopped", "asleep", "leaving", "coming") and not at_start


def adapter_able(model: ModelStatus, adapter: AdapterStatus) -> bool:
    """The same of one of its adapters, beside the model itself: it is loaded, or comes with it."""
    away = model.residence is not None and model.residence.tier != "resident"
    return adapter.state == "serving" or (away and adapter.state == "loading")
