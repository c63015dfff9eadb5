"""What is in deploy/ and the Dockerfile, tried where no Docker and no cluster is at hand."""
