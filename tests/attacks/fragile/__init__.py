"""A package of somebody else that brings the engine `fragile`; installed by `plugin_site`."""
