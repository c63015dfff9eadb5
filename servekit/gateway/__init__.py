"""The gateway process: HTTP and Gradio in front, the workers' sockets behind. Never torch."""
