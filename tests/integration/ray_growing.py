"""How a Ray head is started that has an autoscaler, with nodes of this machine to be had.

Ray's own `AutoscalingCluster` ends all of Ray on the machine, and takes a port that others may
have; this is what it does, without that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

#: What can be had: one node, with so many CPUs.
CPUS = 3
_HEAD = "ray.head.default"
#: Keys that Ray wants to be there.
_LISTS = (
    *("initialization_commands", "setup_commands", "rsync_filter", "rsync_exclude"),
    *("head_setup_commands", "head_start_ray_commands"),
    *("worker_setup_commands", "worker_start_ray_commands", "cluster_synced_files"),
)


#: What Ray reads in the environment of the head.
ENVIRON = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


def head(folder: Path) -> dict[str, Any]:
    """Arguments of `Nodes` for the head."""
    from ray._private.services import get_node_ip_address
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    with socket.socket() as free:
        free.bind(("0.0.0.0", 0))
        port: int = free.getsockname()[1]
    host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    large = {"CPU": CPUS, "object_store_memory": 80 * 2**20}
    config = {
        "cluster_name": "growing",
        "max_workers": 1,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"{host}:{port}",
        },
        "available_node_types": {
            _HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "large": {"resources": large, "node_config": {}, "min_workers": 0, "max_workers": 1},
        },
        "head_node_type": _HEAD,
        "idle_timeout_minutes": 60,
        "upscaling_speed": 1.0,
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in _LISTS},
        "file_mounts_sync_continuously": False,
    }
    path = folder / "autoscaler.json"
    path.write_text(json.dumps(config))
    return {
        "autoscaling_config": str(path),
        "no_monitor": False,
        "gcs_server_port": port,
        "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID},
    }


def end(folder: Path) -> None:
    """Kill what is left of a cluster there: nodes of the autoscaler outlive it."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
