"""The pages and their parts, in this process."""

from servekit.gateway.ui.lean_gradio import import_gradio

# as gateways do: its own import parses the sources of all components
import_gradio()
