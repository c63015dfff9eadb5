"""`python -m servekit.bench`: one client process; see `process`."""

from servekit.bench.process import run_client_process

if __name__ == "__main__":
    run_client_process()
