"""What initialised CUDA, and who imported what: `servekit trace-cuda`, and the import guard.

chain.py, recorder.py    run inside traced programs, in any Python 3.8 or later: stdlib only
injected/                goes first on PYTHONPATH, and loads these two
program.py               starts the program and watches its processes from outside
report.py, text.py       what they recorded, as findings and as text
guard.py                 what the supervisor and the gateway refuse to import
"""
