"""`python -m servekit.bench`: one client process; see `process`."""

from servekit.bench.process import main

if __name__ == "__main__":
    main()
