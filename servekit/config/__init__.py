"""The configuration file: its schema, and reading it with errors that a user can act on.

`schema` and the sections beside it are the types; `yaml` reads text with line numbers, `engines`
knows each engine's options. Every part but `protocol`, `system` and `engines` may import from
here.
"""

from servekit.config.schema import Config, ModelConfig, ServerConfig

__all__ = ["Config", "ModelConfig", "ServerConfig"]
