"""What the nodes of a Ray cluster are, by their own word, and what they can serve."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
from collections.abc import Sequence

from servekit import __version__
from servekit.config.cluster import RayConfig
from servekit.config.schema import ModelConfig
from servekit.protocol.ray_messages import Look, Looked, Node
from servekit.ray import bootstrap, node_requirements
from servekit.ray.client import Cluster, Unable


class NodeInventory:
    """`nodes` are as they were last seen: when we joined, and when a reload brought new models."""

    def __init__(self, settings: RayConfig) -> None:
        self._settings = settings
        self.nodes: tuple[Node, ...] = ()

    def gpus_for(self, model: ModelConfig) -> int:
        """How many each of its workers gets; 0: it runs on the CPU."""
        return node_requirements.gpus_for(model, any_there=any(node.gpus for node in self.nodes))

    def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Why the cluster cannot serve these, as it was last seen; "" if it can."""
        cpus = self._settings.cpus
        needs = [node_requirements.Need(model.name, self.gpus_for(model), cpus) for model in models]
        return node_requirements.refusal(
            self.nodes, own_versions(), needs, grows=self._settings.autoscaled
        )

    async def again(self, cluster: Cluster, models: Sequence[ModelConfig]) -> str:
        """Ask the nodes that there are now for what these need: why they cannot be served."""
        wants, within_s = bootstrap.wants(models), self._settings.connect_s
        try:
            async with asyncio.timeout(within_s):
                looked: Looked = await cluster.ask(lambda id: Look(id, within_s, wants))
        except TimeoutError:
            return f"the Ray cluster has not answered within {within_s:g} s"
        except Unable as error:
            return f"the Ray cluster cannot be asked: {error.message}"
        self.nodes = looked.nodes
        return self.refusal(models)

    async def fault(self, cluster: Cluster, node: Node) -> str:
        """Why nothing of ours can run on a node, whatever room it has; "" if it can."""
        own, within_s = own_versions(), self._settings.connect_s
        if said := node_requirements.fault(node, own):
            try:  # which was true when it came, and it may have been busy, or been set right
                looked: Looked = await cluster.ask(lambda id: Look(id, within_s, (), node.node))
            except Unable as error:
                return error.message
            said = node_requirements.fault(looked.nodes[0], own)
        return said


def own_versions() -> node_requirements.Versions:
    ray = importlib.metadata.version("ray")
    return node_requirements.Versions(__version__, platform.python_version(), ray)
