"""The configuration file: its schema, and reading it with errors a person can act on."""

from servekit.config.schema import Config, ModelConfig, ServerConfig

__all__ = ["Config", "ModelConfig", "ServerConfig"]
