"""Inventory of a Ray cluster's nodes, by their own reports, and what they can serve."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
from collections.abc import Sequence

from servekit import __version__
from servekit.config.schema import ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.protocol.control.ray_messages import InspectNodes, Node, NodesInspected
from servekit.ray import bootstrap, node_requirements
from servekit.ray.client import Cluster, Unable


class NodeInventory:
    """The nodes as last seen: when the cluster was joined, or a reload added models."""

    def __init__(self, settings: RayConfig) -> None:
        self._settings = settings
        self.nodes: tuple[Node, ...] = ()

    def gpus_for(self, model: ModelConfig) -> int:
        """Return the number of GPUs per worker of a model; 0: it runs on the CPU."""
        return node_requirements.gpus_for(model, any_there=any(node.gpus for node in self.nodes))

    def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Return why the last seen nodes cannot serve these models; "" if they can."""
        cpus = self._settings.cpus
        needs = [node_requirements.Need(model.name, self.gpus_for(model), cpus) for model in models]
        return node_requirements.refusal_of_nodes(
            self.nodes, own_versions(), needs, grows=self._settings.autoscaled
        )

    async def query_nodes(self, cluster: Cluster, models: Sequence[ModelConfig]) -> str:
        """Query the current nodes for these models; return why they cannot be served, or ""."""
        wants, within_s = bootstrap.model_wants(models), self._settings.connect_s
        try:
            async with asyncio.timeout(within_s):
                looked: NodesInspected = await cluster.ask_driver(
                    lambda id: InspectNodes(id, within_s, wants)
                )
        except TimeoutError:
            return f"the Ray cluster has not answered within {within_s:g} s"
        except Unable as error:
            return f"the Ray cluster cannot be asked: {error.message}"
        self.nodes = looked.nodes
        return self.refusal(models)

    async def fault(self, cluster: Cluster, node: Node) -> str:
        """Return why no process of ours can run on a node, regardless of room; "" if one can."""
        own, within_s = own_versions(), self._settings.connect_s
        if said := node_requirements.node_fault(node, own):
            try:  # the last report may be outdated: the node may have been busy, or repaired since
                looked: NodesInspected = await cluster.ask_driver(
                    lambda id: InspectNodes(id, within_s, (), node.node)
                )
            except Unable as error:
                return error.message
            said = node_requirements.node_fault(looked.nodes[0], own)
        return said


def own_versions() -> node_requirements.Versions:
    ray = importlib.metadata.version("ray")
    return node_requirements.Versions(__version__, platform.python_version(), ray)
