"""`servekit doctor`: whether this machine is fit to serve, one sentence for each thing looked at.

finding.py    what is said of one thing
examine.py    all examinations, in their order
host.py       memory, processors, limits, /dev/shm, disk
software.py   versions, torch and compiled extensions, each imported in a child (probe.py)
gpus.py       the driver, the GPUs, who holds memory on them; NVML against torch
service.py    the configuration, its port, its run directory
"""
